"""States of linear-attention layers: one record per state slot, kept on the host."""
