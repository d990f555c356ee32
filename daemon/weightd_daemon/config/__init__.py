"""Configuration file: parsing, validation and defaults, without side effects. May import `engines` and `platform`."""
