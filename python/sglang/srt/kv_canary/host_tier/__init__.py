"""Records of KV pages that leave the device pool: in host memory, and in a storage backend."""
