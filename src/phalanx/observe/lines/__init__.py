"""Files of lines that grow: appending whole lines, following what others append, and the index of logged steps beside the event stream."""
