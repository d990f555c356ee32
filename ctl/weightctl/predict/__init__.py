"""`weightctl predict`: one request, its inputs from files of several kinds, its outputs for people or into files."""
