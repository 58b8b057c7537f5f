// Blocks that see each other's shared memory, behind `elements.cuh`: for compute capability 9.0 and later.

// The blocks of a cluster, which share some work.
struct Cluster {
  u32 size, rank;

  __device__ Cluster(u32 size, u32 rank) : size(size), rank(rank) {}
  __device__ Cluster() {
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  }
  // The part of `count` that is the block's.
  __device__ int begin(u32 count) const { return count * rank / size; }
  __device__ int end(u32 count) const { return count * (rank + 1) / size; }

  // All threads of all blocks say that they have come so far, and later wait until all have. What they wrote may not be
  // seen by then: to have it seen costs the time that all writes take to reach the device's memory.
  __device__ static void arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
  __device__ static void await() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

  // What is at an address of a block's shared memory, in that of another one.
  __device__ static u32 in_block(u32 at, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    return there;
  }
};

// In shared memory: counts the bytes that other blocks send to this one.
struct Arrivals {
  u64 barrier;

  __device__ u32 at() const { return (u32)__cvta_generic_to_shared(&barrier); }
  // One thread says how many there will be. The others know it once they have awaited its arrival.
  __device__ void expect(u32 bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(at()) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
  }
  // All of them are there, and seen.
  __device__ void await() const {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra AGAIN;\n}" ::"r"(
            at())
        : "memory");
  }
  // Sends bytes of this block's shared memory to an address in `block`, where they are counted. Both are multiples of 16
  // bytes; they are read after the call.
  __device__ void send(u32 to, u32 from, u32 bytes, u32 block) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            Cluster::in_block(to, block)),
        "r"(from), "r"(bytes), "r"(Cluster::in_block(at(), block))
        : "memory");
  }
};
