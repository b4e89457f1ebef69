"""Models: folders of weights on disk, and how they are fetched, converted, loaded and run."""
