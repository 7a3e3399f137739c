"""The operators: one file each, one public function, differentiable."""
