"""Records sessions durably: one protocol and its stores. Does not import torch, sessions or models."""
