"""The inference server: engines that stay up while training jobs come and go."""
