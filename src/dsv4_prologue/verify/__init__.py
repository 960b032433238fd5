"""Proofs that need no card: an exact interpreter with a memory checker, and cross-compilers."""
