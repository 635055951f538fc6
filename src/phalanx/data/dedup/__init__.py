"""Deduplication: which documents are copies of earlier ones, exactly or nearly."""
