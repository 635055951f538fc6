"""The file of the ranks' numbers: its format, its writer, and the index that reader and writer share."""
