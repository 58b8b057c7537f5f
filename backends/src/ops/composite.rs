//! Every operation in plain ATen calls: for devices and dtypes without a kernel, and as the reference of the kernels' tests.
//! Signatures and meaning are those of [`super`]; arguments are not checked again. It is written for clarity: attention holds
//! all scores of a padded batch at once.

use tch::{Device, Kind, Tensor};

use super::{
    Activation, AttentionOptions, AttentionOutput, Causal, Dropout, GatedSum, LogProbs, Packing, Qkv,
    QkvGrads, Result, Rotation, Store, TokenKind,
};

/// The dtype that sums run in.
pub(super) fn accumulator(tensor: &Tensor) -> Kind {
    if tensor.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}

fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_kind(accumulator(tensor))?)
}

/// Puts `gradient` into `buffer` in the buffer's dtype.
fn store(buffer: &mut Tensor, gradient: &Tensor, how: Store) -> Result<()> {
    match how {
        Store::Write => buffer.f_copy_(gradient)?,
        Store::Add => drop(buffer.f_add_(gradient)?),
    }
    Ok(())
}

/// See [`super::rms_norm`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let x_wide = wide(x)?;
    let mean_square = x_wide.f_square()?.f_mean_dim([-1i64].as_slice(), true, None)?;
    let rstd = mean_square.f_add_scalar(eps)?.f_rsqrt()?;
    let y = x_wide.f_mul(&rstd)?.f_mul(&wide(weight)?)?.f_to_kind(x.kind())?;
    Ok((y, rstd.f_squeeze_dim(-1)?))
}

/// See [`super::add_rms_norm_`].
pub fn add_rms_norm_(
    x: &mut Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    drop(x.f_add_(residual)?);
    rms_norm(x, weight, eps)
}

/// See [`super::rms_norm_backward_`].
pub fn rms_norm_backward_(
    dy: &mut Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    how: Store,
) -> Result<()> {
    let rstd = rstd.f_unsqueeze(-1)?;
    let normed = wide(x)?.f_mul(&rstd)?;
    let (dy_wide, weight) = (wide(dy)?, wide(weight)?);
    let scaled = dy_wide.f_mul(&weight)?;
    let mean = scaled.f_mul(&normed)?.f_mean_dim([-1i64].as_slice(), true, None)?;
    drop(dx.f_add_(&scaled.f_sub(&normed.f_mul(&mean)?)?.f_mul(&rstd)?)?);
    let channels = weight.numel() as i64;
    let per_row = dy_wide.f_mul(&normed)?.f_reshape([-1, channels])?;
    store(dweight, &per_row.f_sum_dim_intlist([0i64].as_slice(), false, None)?, how)?;
    dy.f_copy_(&normed.f_mul(&weight)?)?;
    Ok(())
}

/// See [`super::modulated_norm`].
pub fn modulated_norm(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> Result<Tensor> {
    let channels = x.size()[x.dim() - 1];
    let normed = x.f_layer_norm([channels], None::<&Tensor>, None::<&Tensor>, eps, false)?;
    Ok(normed.f_mul(&scale.f_add_scalar(1.0)?)?.f_add(shift)?)
}

/// See [`super::gated_sums_behind`], and [`super::gated_add`] where nothing is before.
pub fn gated_sums(before: Option<&Tensor>, sums: &[GatedSum]) -> Result<Tensor> {
    let mut all: Vec<Tensor> = before.into_iter().map(Tensor::shallow_clone).collect();
    for GatedSum { x, y, gate } in sums {
        all.push(x.f_add(&y.f_mul(gate)?)?);
    }
    Ok(if all.len() == 1 { all.swap_remove(0) } else { Tensor::f_cat(&all, 1)? })
}

/// See [`super::joint_heads`].
pub fn joint_heads(kinds: &[TokenKind], heads: i64, eps: f64) -> Result<[Tensor; 3]> {
    let mut parts = [const { Vec::new() }; 3];
    for TokenKind { qkv, norms } in kinds {
        let size = qkv.size();
        let dim = size[2] / (3 * heads);
        let all = qkv.f_reshape([size[0], size[1], 3, heads, dim])?;
        for (which, part) in parts.iter_mut().enumerate() {
            let of_kind = all.f_select(2, which as i64)?;
            part.push(match norms.and_then(|norms| norms.get(which).copied()) {
                Some(norm) => super::rms_normed(&of_kind, norm, eps)?,
                None => of_kind,
            });
        }
    }
    let [q, k, v] = parts.map(|part| Tensor::f_cat(&part, 1));
    Ok([q?, k?, v?])
}

/// See [`super::rope_`].
pub fn rope_(x: &mut Tensor, positions: &Tensor, table: &Tensor, rotation: Rotation) -> Result<()> {
    let half = table.size()[1] / 2;
    let rows = table.f_index_select(0, positions)?.f_unsqueeze(1)?.f_to_kind(accumulator(x))?;
    let (cos, sin) = (rows.f_narrow(2, 0, half)?, rows.f_narrow(2, half, half)?);
    let sin = match rotation {
        Rotation::Forward => sin,
        Rotation::Inverse => sin.f_neg()?,
    };
    let mut x = x.f_narrow(2, 0, 2 * half)?;
    let x_wide = wide(&x)?;
    let (first, second) = (x_wide.f_narrow(2, 0, half)?, x_wide.f_narrow(2, half, half)?);
    let rotated_first = first.f_mul(&cos)?.f_sub(&second.f_mul(&sin)?)?;
    let rotated_second = second.f_mul(&cos)?.f_add(&first.f_mul(&sin)?)?;
    x.f_copy_(&Tensor::f_cat(&[rotated_first, rotated_second], 2)?)?;
    Ok(())
}

/// See [`glu()`](super::glu()).
pub fn glu(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let halves = wide(gate_up)?.f_chunk(2, -1)?;
    Ok(activated(&halves[0], activation)?.f_mul(&halves[1])?.f_to_kind(gate_up.kind())?)
}

fn activated(gate: &Tensor, activation: Activation) -> Result<Tensor> {
    Ok(match activation {
        Activation::Silu => gate.f_silu()?,
        Activation::GeluTanh => gate.f_gelu("tanh")?,
    })
}

/// See [`super::glu_backward_`].
pub fn glu_backward_(gate_up: &mut Tensor, dy: &mut Tensor, activation: Activation) -> Result<()> {
    let halves = wide(gate_up)?.f_chunk(2, -1)?;
    let (gate, up, dy_wide) = (&halves[0], &halves[1], wide(dy)?);
    let gated = activated(gate, activation)?;
    let y = gated.f_mul(up)?;
    let dgated = dy_wide.f_mul(up)?;
    let dgate = match activation {
        Activation::Silu => gate.f_silu_backward(&dgated)?,
        Activation::GeluTanh => gate.f_gelu_backward(&dgated, "tanh")?,
    };
    let dup = dy_wide.f_mul(&gated)?;
    gate_up.f_copy_(&Tensor::f_cat(&[dgate, dup], -1)?)?; // `gate` and `up` may be views of it
    dy.f_copy_(&y)?;
    Ok(())
}

/// See [`attention()`](super::attention()). Keys and values have a row for each token.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    packing: &Packing,
    causal: Causal,
) -> Result<(Tensor, Tensor)> {
    let padded = Padded::new(q, k, packing, causal)?;
    let scores = padded.scores(q, k)?;
    let lse = scores.f_logsumexp([-1i64].as_slice(), true)?;
    let probs = scores.f_sub(&lse)?.f_exp()?;
    let out = padded.unpad_queries(&probs.f_matmul(&padded.pad_keys(v)?)?)?;
    Ok((out.f_flatten(1, 2)?.f_to_kind(q.kind())?, padded.unpad_queries(&lse)?.f_squeeze_dim(-1)?))
}

/// See [`super::attention_backward`]. Keys and values have a row for each token.
pub fn attention_backward(
    dout: &Tensor,
    Qkv { q, k, v }: Qkv,
    AttentionOutput { out, lse }: AttentionOutput,
    AttentionOptions { packing, causal, .. }: AttentionOptions,
    QkvGrads { dq, dk, dv }: QkvGrads,
) -> Result<()> {
    let padded = Padded::new(q, k, packing, causal)?;
    let lse = padded.pad_queries(&lse.f_unsqueeze(-1)?)?;
    let probs = padded.scores(q, k)?.f_sub(&lse)?.f_exp()?;
    let dout = padded.pad_queries(&dout.f_view_as(q)?)?;
    let out = padded.pad_queries(&out.f_view_as(q)?)?;
    let delta = dout.f_mul(&out)?.f_sum_dim_intlist([-1i64].as_slice(), true, None)?;
    let dprobs = dout.f_matmul(&padded.pad_keys(v)?.f_transpose(-2, -1)?)?;
    let dscores = dprobs.f_sub(&delta)?.f_mul(&probs)?.f_mul_scalar(causal.scale)?;
    dq.f_copy_(&padded.unpad_queries(&dscores.f_matmul(&padded.pad_keys(k)?)?)?)?;
    let queries = padded.pad_queries(q)?;
    dk.f_copy_(&padded.unpad_keys(&dscores.f_transpose(-2, -1)?.f_matmul(&queries)?)?)?;
    dv.f_copy_(&padded.unpad_keys(&probs.f_transpose(-2, -1)?.f_matmul(&dout)?)?)?;
    Ok(())
}

/// A packed batch laid out as `[B, K, heads per K, T, D]`, T the longest sequence.
struct Padded {
    /// The padded places of queries and of keys: int64 `[Q]` and `[N]`.
    of_queries: Tensor,
    of_keys: Tensor,
    /// Mask, true if query `i` does not see key `j`: bool `[T, T]`.
    unseen: Tensor,
    scale: f64,
    sequences: i64,
    max_len: i64,
    kv_heads: i64,
    kind: Kind,
}

impl Padded {
    fn new(q: &Tensor, k: &Tensor, packing: &Packing, causal: Causal) -> Result<Padded> {
        let (sequences, max_len) = (packing.sequences(), packing.max_len());
        let places = |offsets: &Tensor, positions: &Tensor| -> Result<Tensor> {
            let lengths = offsets.f_to_kind(Kind::Int64)?.f_diff(1, -1, None::<&Tensor>, None::<&Tensor>)?;
            let sequence = Tensor::f_repeat_interleave(&lengths, positions.numel() as i64)?;
            Ok(sequence.f_mul_scalar(max_len)?.f_add(positions)?)
        };
        let [of_queries, of_keys] = packing.offsets_int32();
        Ok(Padded {
            of_queries: places(of_queries, packing.positions())?,
            of_keys: places(of_keys, packing.positions_of_tokens())?,
            unseen: unseen(max_len, max_len, causal, q.device())?,
            scale: causal.scale,
            sequences,
            max_len,
            kv_heads: k.size()[1],
            kind: accumulator(q),
        })
    }

    /// Masked scores `[B, K, H / K, T, T]`.
    fn scores(&self, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        let keys = self.pad_keys(k)?.f_transpose(-2, -1)?;
        let scores = self.pad_queries(q)?.f_matmul(&keys)?.f_mul_scalar(self.scale)?;
        Ok(scores.f_masked_fill(&self.unseen, f64::NEG_INFINITY)?)
    }

    fn pad_queries(&self, x: &Tensor) -> Result<Tensor> {
        self.pad(x, &self.of_queries)
    }

    fn pad_keys(&self, x: &Tensor) -> Result<Tensor> {
        self.pad(x, &self.of_keys)
    }

    fn pad(&self, x: &Tensor, places: &Tensor) -> Result<Tensor> {
        let (heads, dim) = (x.size()[1], x.size()[2]);
        let size = [self.sequences * self.max_len, heads, dim];
        let mut padded = Tensor::f_zeros(size, (self.kind, x.device()))?;
        drop(padded.f_index_copy_(0, places, &x.f_to_kind(self.kind)?)?);
        let size = [self.sequences, self.max_len, self.kv_heads, heads / self.kv_heads, dim];
        Ok(padded.f_view(size)?.f_permute([0, 2, 3, 1, 4])?)
    }

    fn unpad_queries(&self, x: &Tensor) -> Result<Tensor> {
        self.unpad(x, &self.of_queries)
    }

    /// Sums over the query heads that share a key.
    fn unpad_keys(&self, x: &Tensor) -> Result<Tensor> {
        self.unpad(&x.f_sum_dim_intlist([2i64].as_slice(), true, None)?, &self.of_keys)
    }

    fn unpad(&self, x: &Tensor, places: &Tensor) -> Result<Tensor> {
        let (group, dim) = (x.size()[2], x.size()[4]);
        let size = [self.sequences * self.max_len, self.kv_heads * group, dim];
        Ok(x.f_permute([0, 3, 1, 2, 4])?.f_reshape(size)?.f_index_select(0, places)?)
    }
}

/// See [`super::decode_attention`].
pub fn decode_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    tables: &Tensor,
    lengths: &Tensor,
    causal: Causal,
) -> Result<Tensor> {
    let (size, kv_heads) = (q.size(), k_cache.size()[2]);
    let (rows, heads, dim) = (size[0], size[1], size[2]);
    let len = tables.size()[1] * k_cache.size()[1];
    let kind = accumulator(q);
    let places = Tensor::f_arange(len, (Kind::Int64, q.device()))?;
    let lengths = lengths.f_view([rows, 1, 1, 1])?;
    let mut unseen = places.f_ge_tensor(&lengths)?; // [B, 1, 1, L]
    if let Some(window) = causal.window {
        unseen = unseen.f_logical_or(&places.f_lt_tensor(&lengths.f_sub_scalar(window)?)?)?;
    }
    let gather = |cache: &Tensor| -> Result<Tensor> {
        // [blocks, T, K, D] to [B, K, L, D]. What was never written may be NaN, which 0 does not silence.
        let all = cache.f_index_select(0, &tables.f_flatten(0, 1)?)?.f_view([rows, len, kv_heads, dim])?;
        let all = all.f_transpose(1, 2)?.f_to_kind(kind)?;
        Ok(all.f_masked_fill(&unseen.f_transpose(2, 3)?, 0.0)?)
    };
    let queries = q.f_to_kind(kind)?.f_view([rows, kv_heads, heads / kv_heads, dim])?;
    let scores = queries.f_matmul(&gather(k_cache)?.f_transpose(-2, -1)?)?;
    let scores = scores.f_mul_scalar(causal.scale)?;
    let probs = scores.f_masked_fill(&unseen, f64::NEG_INFINITY)?.f_softmax(-1, None)?;
    Ok(probs.f_matmul(&gather(v_cache)?)?.f_reshape([rows, heads * dim])?.f_to_kind(q.kind())?)
}

/// See [`super::attention_with_history`].
pub fn attention_with_history(q: &Tensor, k: &Tensor, v: &Tensor, causal: Causal) -> Result<Tensor> {
    let (size, tokens, kv_heads) = (q.size(), k.size()[0], k.size()[1]);
    let (rows, heads, dim) = (size[0], size[1], size[2]);
    let kind = accumulator(q);
    // [tokens, K, D] to [K, 1, tokens, D]
    let of_keys =
        |x: &Tensor| -> Result<Tensor> { Ok(x.f_to_kind(kind)?.f_transpose(0, 1)?.f_unsqueeze(1)?) };
    let queries = q.f_to_kind(kind)?.f_reshape([rows, kv_heads, heads / kv_heads, dim])?;
    let queries = queries.f_permute([1, 2, 0, 3])?;
    let scores = queries.f_matmul(&of_keys(k)?.f_transpose(-2, -1)?)?.f_mul_scalar(causal.scale)?;
    let unseen = unseen(rows, tokens, causal, q.device())?;
    let probs = scores.f_masked_fill(&unseen, f64::NEG_INFINITY)?.f_softmax(-1, None)?;
    let out = probs.f_matmul(&of_keys(v)?)?.f_permute([2, 0, 1, 3])?;
    Ok(out.f_reshape([rows, heads * dim])?.f_to_kind(q.kind())?)
}

/// Mask, true if one of the last `rows` tokens of a sequence does not see one of its `tokens`: bool `[rows, tokens]`.
fn unseen(rows: i64, tokens: i64, causal: Causal, device: Device) -> Result<Tensor> {
    let all = Tensor::f_ones([rows, tokens], (Kind::Bool, device))?;
    let (own, behind) = (tokens - rows, all.f_triu(tokens - rows + 1)?);
    match causal.window {
        Some(window) => Ok(behind.f_logical_or(&all.f_tril(own - window)?)?),
        None => Ok(behind),
    }
}

/// See [`super::logprobs`].
pub fn logprobs(logits: &Tensor, targets: &Tensor, temperature: f64) -> Result<LogProbs> {
    let scaled = wide(logits)?.f_div_scalar(temperature)?;
    let lse = scaled.f_logsumexp([-1i64].as_slice(), true)?;
    let log_p = scaled.f_sub(&lse)?;
    let logprobs = log_p.f_gather(1, &targets.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
    let entropy = log_p.f_exp()?.f_mul(&log_p)?.f_sum_dim_intlist([1i64].as_slice(), false, None)?.f_neg()?;
    Ok(LogProbs { logprobs, entropy, lse: lse.f_squeeze_dim(1)? })
}

/// See [`super::logprobs_backward_`].
pub fn logprobs_backward_(
    logits: &mut Tensor,
    targets: &Tensor,
    temperature: f64,
    saved: (&Tensor, &Tensor),
    dlogprobs: &Tensor,
    dentropy: Option<&Tensor>,
) -> Result<()> {
    let (lse, entropy) = saved;
    let log_p = wide(logits)?.f_div_scalar(temperature)?.f_sub(&lse.f_unsqueeze(1)?)?;
    let probs = log_p.f_exp()?;
    let dlogprobs = dlogprobs.f_unsqueeze(1)?;
    let mut gradient = probs.f_mul(&dlogprobs)?.f_neg()?;
    drop(gradient.f_scatter_add_(1, &targets.f_unsqueeze(1)?, &dlogprobs)?);
    if let Some(dentropy) = dentropy {
        let slope = log_p.f_add(&entropy.f_unsqueeze(1)?)?.f_mul(&probs)?;
        gradient = gradient.f_sub(&slope.f_mul(&dentropy.f_unsqueeze(1)?)?)?;
    }
    logits.f_copy_(&gradient.f_div_scalar(temperature)?)?;
    Ok(())
}

/// See [`super::dropout()`].
pub fn dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    let columns = Tensor::f_arange(x.size()[1], (Kind::Int64, x.device()))?;
    let rows = mix(&dropout.keys.f_bitwise_xor(i64::from(dropout.salt))?)?;
    let hashes = mix(&rows.f_unsqueeze(1)?.f_bitwise_xor_tensor(&mix(&columns)?)?)?;
    let dropped = hashes.f_lt(i64::from(dropout.threshold()))?;
    let kept = wide(x)?.f_mul_scalar(dropout.scale())?.f_to_kind(x.kind())?;
    Ok(kept.f_masked_fill(&dropped, 0.0)?)
}

/// A bijection of 32-bit numbers that leaves no bit where it was; in int64, where the products have room.
fn mix(x: &Tensor) -> Result<Tensor> {
    let folded = |x: &Tensor| x.f_bitwise_xor_tensor(&x.f_bitwise_right_shift_tensor_scalar(16)?);
    let times = |x: &Tensor| x.f_mul_scalar(0x45d_9f3b)?.f_bitwise_and(0xffff_ffff);
    Ok(folded(&times(&folded(&times(&folded(x)?)?)?)?)?)
}

/// See [`super::embedding_backward`].
pub fn embedding_backward(dy: &Tensor, tokens: &Tensor, dweight: &mut Tensor, how: Store) -> Result<()> {
    let vocabulary = dweight.size()[0];
    let gradient = Tensor::f_embedding_dense_backward(&wide(dy)?, tokens, vocabulary, -1, false)?;
    store(dweight, &gradient, how)
}

/// See [`super::sum_rows`].
pub fn sum_rows(x: &Tensor, out: &mut Tensor, how: Store) -> Result<()> {
    store(out, &wide(x)?.f_sum_dim_intlist([0i64].as_slice(), false, None)?, how)
}

/// See [`super::sum_ranks`]. Bitwise what the kernel does.
pub fn sum_ranks(received: &Tensor, out: &mut Tensor, how: Store) -> Result<()> {
    let of_rank = |rank| received.f_select(0, rank)?.f_to_kind(Kind::Float);
    let mut sum = of_rank(0)?;
    for rank in 1..received.size()[0] {
        sum = sum.f_add(&of_rank(rank)?)?;
    }
    store(out, &sum, how)
}
