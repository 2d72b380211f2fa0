"""What runs inside a TorchServe worker. Packed whole into each archive; knows nothing of the front proxy."""
