"""The coordinator's shell: sockets, journal, credentials, fleet file and hang inquiry."""
