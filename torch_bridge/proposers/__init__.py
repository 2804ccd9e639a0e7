"""Drafters with the classes and signatures of vLLM's."""
