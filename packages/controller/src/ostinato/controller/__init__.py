"""Single controller over SPMD worker groups: register, dispatch, resource pools; Ray and in-process."""
