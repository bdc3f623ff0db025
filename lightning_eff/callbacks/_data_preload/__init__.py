"""Parts of `callbacks/data_preload`: trials with workers, and batches that are fetched ahead."""
