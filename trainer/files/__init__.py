"""Files and paths: atomic writes, appended lines, typed documents, URIs, shared memory."""
