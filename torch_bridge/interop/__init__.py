"""Tensors between torch and JAX: DLPack, packed transfers, checks."""
