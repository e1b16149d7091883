"""What engines call, taken from their sources and FlashInfer's."""
