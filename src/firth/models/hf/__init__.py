"""How each family of `transformers` names its tensors and settings."""
