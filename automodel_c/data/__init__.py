"""Chat-style data sets, from JSONL and image files to padded microbatches."""
