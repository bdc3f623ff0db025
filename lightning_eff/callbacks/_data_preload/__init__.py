"""Parts of `callbacks/data_preload`: timing of a loader with workers, and prefetching of its batches."""
