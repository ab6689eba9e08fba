"""KV canary: checks on every forward that each KV slot still holds what its reader expects."""
