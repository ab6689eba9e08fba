"""Attachers, one file per pool family. Each is imported only when a pool of its family is attached."""
