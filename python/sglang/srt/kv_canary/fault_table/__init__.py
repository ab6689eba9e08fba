"""The fault table: KV-cache bugs that happened, staged in SGLang's own code, and what the canary says of each."""
