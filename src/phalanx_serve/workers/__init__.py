"""Several workers of one service: their processes, the router's connections, and the transport of KV pages between
them.
"""
