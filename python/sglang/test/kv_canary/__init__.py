"""Fixtures and harness that the KV-canary tests share."""
