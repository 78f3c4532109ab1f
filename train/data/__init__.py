"""What the loop learns from: token shards, images, and the streams that turn them into batches."""
