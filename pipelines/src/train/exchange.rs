//! Numbers that every rank needs from every other: rewards, lengths, sums of losses.

use anyroll_backends::{Buffer, CollectiveGroup, DType, PinnedBuffer, Stream};

use crate::Result;

/// Gathers host numbers over a group.
#[derive(Debug)]
pub struct Exchange {
    group: CollectiveGroup,
    stream: Stream,
}

impl Exchange {
    /// Over the ranks of `group`.
    pub fn new(group: &CollectiveGroup) -> Result<Self> {
        let stream = Stream::new(group.stream().device())?;
        Ok(Self { group: group.clone(), stream })
    }

    /// The ranks.
    pub fn group(&self) -> &CollectiveGroup {
        &self.group
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Everybody's `values`, one list a rank, in rank order. Every rank passes equally many.
    pub fn gather(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        // Collectives have no fp64: the numbers travel as bytes.
        let bytes = bytes(values);
        let gathered = self.gather_bytes(&bytes)?;
        Ok(gathered.chunks_exact(bytes.len().max(1)).map(numbers).collect())
    }

    /// The sums over ranks of each of `values`, added in rank order.
    pub fn sum(&self, values: &[f64]) -> Result<Vec<f64>> {
        let mut sums = vec![0.0; values.len()];
        for rank in self.gather(values)? {
            sums.iter_mut().zip(rank).for_each(|(sum, value)| *sum += value);
        }
        Ok(sums)
    }

    /// Rank 0's `text`, which the others leave empty. At most 4 KiB.
    pub fn text_of_first(&self, text: &str) -> Result<String> {
        const CAPACITY: usize = 4 << 10;
        assert!(text.len() <= CAPACITY, "a text of {} bytes", text.len());
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(CAPACITY, 0);
        let first = &self.gather_bytes(&bytes)?[..CAPACITY];
        let end = first.iter().position(|&byte| byte == 0).unwrap_or(CAPACITY);
        Ok(String::from_utf8_lossy(&first[..end]).into_owned())
    }

    /// Everybody's text, in rank order; they may differ in length.
    pub fn gather_texts(&self, text: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths: Vec<usize> =
            self.gather(&[text.len() as f64])?.iter().map(|length| length[0] as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = text.to_vec();
        padded.resize(longest, 0);
        let gathered = self.gather_bytes(&padded)?;
        let texts = gathered.chunks_exact(longest.max(1)).zip(lengths);
        Ok(texts.map(|(text, length)| text[..length].to_vec()).collect())
    }

    /// As [`Self::gather`], of numbers of which each rank may have as many as it likes.
    pub fn gather_uneven(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        Ok(self.gather_texts(&bytes(values))?.iter().map(|rank| numbers(rank)).collect())
    }

    fn gather_bytes(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let len = bytes.len();
        let all = Buffer::zeros(&self.stream, len * self.world_size(), DType::U8)?;
        let mine = all.slice(self.rank() * len..(self.rank() + 1) * len);
        let mut host = PinnedBuffer::new(self.stream.device(), len * self.world_size())?;
        host.bytes_mut()?[..len].copy_from_slice(bytes);
        host.copy_to(0, &mine, &self.stream)?;
        let work = self.group.all_gather(&all, &mine, &self.stream)?;
        work.wait()?;
        work.wait_stream(&self.stream)?;
        host.copy_from(0, &all, &self.stream)?;
        Ok(host.bytes()?.to_vec())
    }
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f64> {
    let (chunks, _) = bytes.as_chunks();
    chunks.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect()
}
