"""Object stores: objects by URL in S3, Google Cloud Storage, Azure Blob Storage or a folder, with one set of rules for all.

Nothing is imported here: the client library is loaded by the first URL that needs it.
"""
