def blocks_of(T, H, kind):
    b = 512 if T > 256 else 128
    L = -(-T // b) * b
    return L, dict(block_q=b, block_kv=b, block_kv_compute=b, block_q_dkv=b, block_kv_dkv=b, block_kv_dkv_compute=b, block_q_dq=b, block_kv_dq=b)
