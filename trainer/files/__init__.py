"""Files and names of files: atomic writes, appended lines, typed documents, URIs, shared memory."""
