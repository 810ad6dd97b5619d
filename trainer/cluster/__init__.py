"""The processes of a job: on Ray, or without it (`local`). The one room that imports Ray."""
