// Causal attention over packed sequences, behind `attention.cuh`. Every sum is made by one block in one order, so that
// results repeat to the bit. A block of keys is multiplied while exponentials of the one before are made, and two groups of
// warps take turns at the matrix units (the ways of FlashAttention-3; Shah et al., 2024).

// A block has a tile of queries and goes through the keys that they see.
template <int D>
struct Outputs {
  static constexpr int STAGES = 5, AHEAD = 2, KEYS = 128;
  using Queries = Tile<TILE, D>;
  using Keys = Tile<KEYS, D>;
  // Queries, then stages of keys or values.
  static constexpr int STAGES_AT = Queries::BYTES, STAGE_BYTES = Keys::BYTES;
  static constexpr int BARRIERS_AT = STAGES_AT + STAGES * STAGE_BYTES;
  static constexpr int BYTES = BARRIERS_AT + Ring<STAGES>::BYTES;

  const Forward& of;
  const Work work;
  const SeenKeys<KEYS> seen;
  Ring<STAGES, AHEAD> ring;

  __device__ Outputs(const Forward& of)
      : of(of), work(of, of.heads), seen(work, of.window), ring(shared_at(BARRIERS_AT)) {}
  __device__ u32 stage(int index) const { return shared_at(STAGES_AT) + index * STAGE_BYTES; }

  // In the order in which they are multiplied: of each block the keys, and behind them the values of the one before.
  __device__ void copy_all() {
    const int kv_head = work.head / (of.heads / of.kv_heads);
    const auto copy_block = [&](Heads from, int block) {
      const u32 to = stage(ring.take_empty());
      work.copy_keys<Keys>(to, from, kv_head, seen.first + block * KEYS);
      ring.fill();
    };
    // They come with the first stage.
    work.copy_queries<Queries>(shared_at(0), of.q, work.head, work.first);
    for (int b = 0; b < seen.blocks; b++) {
      copy_block(of.k, b);
      if (b > 0) copy_block(of.v, b - 1);
    }
    copy_block(of.v, seen.blocks - 1);
    ring.fill_rest();
  }

  __device__ void multiply_all(int row) {
    const int query = work.first + row;
    float out[D / 2] = {}, scores[KEYS / 2], most[2] = {-INFINITE, -INFINITE}, sum[2] = {}, keep[2];
    u32 probabilities[KEYS / 4];
    if (row > 0) give_turn(row);
    await_turn(row);
    u32 keys = stage(ring.take_full());
    begin_products();
    multiply_tiles<Queries, Keys>(scores, shared_at(0), row, keys);
    give_turn(row);
    await_products<0>(scores);
    ring.leave();
    weigh(scores, query, seen.first, most, sum, keep);
    to_operand(scores, probabilities);
    for (int b = 1; b < seen.blocks; b++) {
      keys = stage(ring.take_full());
      await_turn(row);
      begin_products();
      multiply_tiles<Queries, Keys>(scores, shared_at(0), row, keys);
      const u32 values = stage(ring.take_full());
      begin_products();
      add_products<Keys>(out, probabilities, values);
      give_turn(row);
      await_products<1>(scores);
      ring.leave();
      weigh(scores, query, seen.first + b * KEYS, most, sum, keep);
      await_products<0>(out);
      ring.leave();
#pragma unroll
      for (int i = 0; i < D / 2; i++) out[i] *= keep[i / 2 % 2];
      to_operand(scores, probabilities);
    }
    const u32 values = stage(ring.take_full());
    await_turn(row);
    begin_products();
    add_products<Keys>(out, probabilities, values);
    if (row == 0) give_turn(row);
    await_products<0>(out);
    ring.leave();
    finish(query, out, most, sum);
  }

  // One group of warps gives its products to the matrix units, then the other.
  __device__ void await_turn(int row) const { asm volatile("bar.sync %0, 256;" ::"r"(1 + row / ROWS) : "memory"); }
  __device__ void give_turn(int row) const { asm volatile("bar.arrive %0, 256;" ::"r"(2 - row / ROWS) : "memory"); }

  // Scores become what the values are weighed with, up to the sum of all; `keep` is what is left of those before.
  __device__ void weigh(float (&scores)[KEYS / 2], int query, int key, float (&most)[2], float (&sum)[2],
                        float (&keep)[2]) const {
    const Sight sight = {of.window, work.len};
    if (!sight.all(query, ROWS, key, KEYS)) {
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) {
        const bool sees = sight.sees(query + own_row() + row_of(i), key + own_column() + column_of(i));
        if (!sees) scores[i] = -INFINITE;
      }
    }
    const float scale = of.scale * LOG2_E;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float now = most[half], total = 0;
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) {
        if (i / 2 % 2 == half) now = fmaxf(now, scores[i]);
      }
      now = over_quad<larger>(now);
      const float base = now == -INFINITE ? 0 : now * scale;  // of a query that has seen nothing yet
      keep[half] = power_of_two(__fmaf_rn(most[half], scale, -base));
      most[half] = now;
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) {
        if (i / 2 % 2 == half) total += scores[i] = power_of_two(__fmaf_rn(scores[i], scale, -base));
      }
      sum[half] = sum[half] * keep[half] + total;
    }
  }

  __device__ void finish(int query, const float (&out)[D / 2], const float (&most)[2], const float (&sum)[2]) const {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float total = over_quad<add>(sum[half]);
      const int mine = query + own_row() + half * 8;
      inverse[half] = 1 / total;
      if (own_column() > 0 || mine >= work.len) continue;
      of.lse[((i64)work.own + mine) * of.lse_row + work.head * of.lse_head] = most[half] * of.scale + logf(total);
    }
    work.store(out, of.out, work.own, query, inverse);
  }
};

// What `kernels/attention.rs` asks for.
static_assert(Outputs<64>::BYTES == 98384 && Outputs<128>::BYTES == 196688, "outputs_bytes");

// The bounds are what makes ptxas heed the registers that `run` deals out.
#define ATTENTION(D)                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAMED(attention_outputs_##D)(Forward of) { \
    run<Outputs<D>>(of);                                                                              \
  }
ATTENTION(64)
ATTENTION(128)
