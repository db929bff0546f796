"""The report of a run: one HTML page that needs nothing else.

From the bottom: `text`, `clock`, `series`, `loads` and `members` take the events apart; `svg`
makes pictures for a page; `plots` draws; `page` puts all together. The whole stands on the
telemetry alone, and needs the extra `tools` (matplotlib) and Jinja.
"""
