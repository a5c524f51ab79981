"""encoder_bench: one job at a time through the real `JobRunner`, around a fake engine and a fake store."""
