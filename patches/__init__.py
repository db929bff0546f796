"""All patches of upstream code, one file per patched upstream module."""
