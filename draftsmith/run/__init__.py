"""A stage's life on disk: records, atomic files, processes, progress and errors."""
