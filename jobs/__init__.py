"""Runnable modules: parse, build the config, call ``ingest``, print."""
