"""Published models of Hugging Face: read, sharded, and written."""
