"""Environment variables with which the processes of a server find its compile server. Not for users."""

FOLDER_ENV = "_KV_CANARY_COMPILE_FOLDER"  # of requests, see `kernels.triton.compile_requests`
COMPILES_ENV = (
    "_KV_CANARY_COMPILES"  # set in processes that only compile: kernels are for a GPU, without one
)
