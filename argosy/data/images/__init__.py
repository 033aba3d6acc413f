"""Image data: sources of images, and the rows of batches that are made of them."""
