//! Batches cut into slices for several ranks: each sends its own to the others, and takes its rows of all.

use std::{cell::OnceCell, ops::Range, sync::Arc};

use anyroll_backends::ops::{Packing, upload};
use tch::{Device, Tensor};

use super::PackedBatch;
use super::padding::{Counted, Padding};
use crate::slice::{Division, Peers, Sharers, Slice, Turn, columns, padded};
use crate::{Error, Result};

impl PackedBatch {
    /// Returns the batches of all `sharers`, in rank order: of each this rank's slice, if it takes one, which is
    /// [mirrored](Division) or not. All of them call this at once. Waits for the device.
    pub(crate) fn cut(&self, sharers: &Sharers, is_mirrored: bool) -> Result<Vec<PackedBatch>> {
        let Sharers { all: peers, rows } = sharers;
        let device = self.tokens.device();
        let sent = Message::of(self)?.encoded();
        let lengths = host(&peers.all_gather(&upload(&[sent.len() as i64], device)?)?)?;
        let longest = lengths.into_iter().max().unwrap_or(0);
        let all = host(&peers.all_gather(&padded(&upload(&sent, device)?, longest)?)?)?;
        let messages = all.chunks_exact(longest as usize).map(Message::decoded);
        let batches = messages.enumerate().map(|(owner, message)| {
            let targets = message.targets.len() as i64;
            let turn = Turn { peers: peers.clone(), owner, targets };
            let batch = match rows {
                Some(rows) => message.slice(rows, is_mirrored, device)?,
                None => message.whole(device)?,
            };
            let router = self.router.as_ref().map(|router| match &batch.slice {
                Some(slice) => router.of_part(owner, slice.real_rows(), slice.peers.count()),
                None => router.of_part(owner, batch.tokens(), 1),
            });
            Ok(PackedBatch { turn: Some(turn), router, ..batch })
        });
        batches.collect()
    }

    /// Joins fp32 numbers of the targets of a batch that [`Self::cut`] returned, on each rank those of its rows, to those of
    /// the whole batch.
    pub(crate) fn join<const N: usize>(&self, of_own: [&Tensor; N]) -> Result<[Tensor; N]> {
        match &self.slice {
            Some(slice) => slice.join(of_own),
            None => Ok(of_own.map(Tensor::shallow_clone)),
        }
    }

    /// Returns this rank's part of fp32 numbers of all targets, `[M]` each, which only the batch's rank has.
    pub(crate) fn cut_numbers<const N: usize>(&self, of_all: Option<[Tensor; N]>) -> Result<[Tensor; N]> {
        let turn = self.turn.as_ref().expect("the batch was cut");
        let of_all = turn.of_owner(of_all, self.tokens.device())?;
        match &self.slice {
            Some(slice) => columns(&of_all.f_index_select(0, &slice.own_targets)?),
            None => columns(&of_all),
        }
    }
}

fn host(values: &Tensor) -> Result<Vec<i64>> {
    Ok(Vec::try_from(values.f_flatten(0, -1)?.f_to_device(Device::Cpu)?)?)
}

/// Number of values before the lists of an encoded [`Message`].
const HEADER: usize = 12;

/// A batch as ranks send it to each other.
#[derive(Debug, PartialEq)]
struct Message {
    temperature: f64,
    adapters: bool,
    extremes: Option<[i64; 2]>,
    /// Number of inputs of each sequence, and the row of each input.
    lengths: Vec<i64>,
    rows: Vec<i64>,
    /// The token of each row, and its key of dropout if the batch has these.
    tokens: Vec<i64>,
    row_keys: Option<Vec<i64>>,
    /// Experts of each row, and their sizes: layers and experts per token; 0 without routes.
    routes: Vec<i16>,
    route_size: [i64; 2],
    /// The row of each target, and the targets.
    target_rows: Vec<i64>,
    targets: Vec<i64>,
}

impl Message {
    /// Leaves the batch's padding out.
    fn of(batch: &PackedBatch) -> Result<Message> {
        if batch.teacher.is_some() {
            let problem = "its rows are not cut for several ranks".to_owned();
            return Err(Error::Input { what: "teacher", problem });
        }
        let Counted { sequences, inputs, tokens, targets } = batch.counted;
        let packing = &batch.packing;
        let lengths = packing.offsets().windows(2).map(|ends| ends[1] - ends[0]);
        let first = |values: &Tensor, count: i64| values.f_narrow(0, 0, count);
        Ok(Message {
            temperature: batch.temperature,
            adapters: batch.adapters,
            extremes: batch.extremes,
            lengths: lengths.take(sequences as usize).collect(),
            rows: match packing.shared_rows() {
                Some(rows) => rows[..inputs as usize].to_vec(),
                None => (0..inputs).collect(),
            },
            tokens: host(&first(&batch.tokens, tokens)?)?,
            row_keys: batch.row_keys.as_ref().map(|keys| host(&first(keys, tokens)?)).transpose()?,
            routes: batch.routes.as_ref().map_or(Ok(Vec::new()), |routes| {
                Vec::try_from(first(routes, tokens)?.f_flatten(0, -1)?.f_to_device(Device::Cpu)?)
            })?,
            route_size: batch.routes.as_ref().map_or([0; 2], |routes| [routes.size()[1], routes.size()[2]]),
            target_rows: host(&first(&batch.target_rows, targets)?)?,
            targets: host(&first(&batch.targets, targets)?)?,
        })
    }

    fn encoded(&self) -> Vec<i64> {
        let [least, most] = self.extremes.unwrap_or_default();
        let flags = [self.adapters, self.extremes.is_some(), self.row_keys.is_some()].map(i64::from);
        let sizes = [&self.lengths, &self.rows, &self.tokens, &self.targets].map(|list| list.len() as i64);
        let temperature = [self.temperature.to_bits().cast_signed()];
        let header: [&[i64]; 5] = [&temperature, &flags, &[least, most], &sizes, &self.route_size];
        let keys = self.row_keys.as_deref().unwrap_or_default();
        let routes = in_words(&self.routes);
        let lists =
            [&self.lengths, &self.rows, &self.tokens, keys, &routes, &self.target_rows, &self.targets];
        [header.concat(), lists.concat()].concat()
    }

    fn decoded(values: &[i64]) -> Message {
        let (header, mut rest) = values.split_at(HEADER);
        let &[
            temperature,
            adapters,
            has_extremes,
            has_keys,
            least,
            most,
            sequences,
            inputs,
            rows,
            targets,
            layers,
            per_token,
        ] = header
        else {
            unreachable!("a header has {HEADER} values")
        };
        let mut list = |len: i64| {
            let (list, behind) = rest.split_at(len as usize);
            rest = behind;
            list.to_vec()
        };
        Message {
            temperature: f64::from_bits(temperature.cast_unsigned()),
            adapters: adapters != 0,
            extremes: (has_extremes != 0).then_some([least, most]),
            lengths: list(sequences),
            rows: list(inputs),
            tokens: list(rows),
            row_keys: (has_keys != 0).then(|| list(rows)),
            routes: {
                let experts = (rows * layers * per_token) as usize;
                from_words(&list(experts.div_ceil(ROUTES_OF_A_WORD) as i64), experts)
            },
            route_size: [layers, per_token],
            target_rows: list(targets),
            targets: list(targets),
        }
    }

    /// Returns the batch.
    fn whole(self, device: Device) -> Result<PackedBatch> {
        Ok(PackedBatch {
            counted: Counted {
                sequences: self.lengths.len() as i64,
                inputs: self.rows.len() as i64,
                tokens: self.tokens.len() as i64,
                targets: self.targets.len() as i64,
            },
            padding: Padding::NONE,
            packing: Packing::sharing(&self.lengths, &self.rows, device)?,
            tokens: upload(&self.tokens, device)?,
            target_rows: upload(&self.target_rows, device)?,
            targets: upload(&self.targets, device)?,
            row_keys: self.row_keys.map(|keys| upload(&keys, device)).transpose()?,
            routes: routes_of(&self.routes, self.route_size, device)?,
            router: None,
            extremes: self.extremes,
            temperature: self.temperature,
            adapters: self.adapters,
            teacher: None,
            turn: None,
            slice: None,
        })
    }

    /// Returns this rank's slice of the batch.
    fn slice(self, peers: &Arc<dyn Peers>, is_mirrored: bool, device: Device) -> Result<PackedBatch> {
        let (rank, ranks, rows) = (peers.rank(), peers.count(), self.tokens.len());
        let division = Division::new(rows, ranks, is_mirrored);
        let (pieces, count) = (division.pieces(rank), division.own() as i64);
        let own = |values: Vec<i64>| upload(&own_rows(&values, 1, 0, &pieces), device);
        let packing = Packing::sharing(&self.lengths, &self.rows, device)?;
        let all = padded(packing.positions(), count * ranks as i64)?;
        let of_pieces = pieces.iter().map(|piece| all.f_narrow(0, piece.start as i64, piece.len() as i64));
        let positions = Tensor::f_cat(&of_pieces.collect::<Result<Vec<_>, _>>()?, 0)?;
        let Places { own: own_targets, places, padded: padded_targets } =
            Places::new(&self.target_rows, division, (rank, ranks));
        let of_own = |values: &[i64]| -> Vec<i64> {
            own_targets.iter().map(|&target| values[target as usize]).collect()
        };
        let target_rows: Vec<i64> =
            of_own(&self.target_rows).iter().map(|&row| division.place(row as usize).1 as i64).collect();
        let targets = of_own(&self.targets);
        let real = |piece: &Range<usize>| piece.start.min(rows) as i64..piece.end.min(rows) as i64;
        let slice = Slice {
            peers: peers.clone(),
            division,
            pieces: pieces.iter().map(real).collect(),
            positions,
            own_targets: upload(&own_targets, device)?,
            places: upload(&places, device)?,
            padded_targets,
            seen: OnceCell::new(),
        };
        let choices = (self.route_size[0] * self.route_size[1]) as usize;
        let routes = own_rows(&self.routes, choices, -1, &pieces);
        Ok(PackedBatch {
            counted: Counted {
                sequences: packing.sequences(),
                inputs: packing.tokens(),
                tokens: count,
                targets: targets.len() as i64,
            },
            padding: Padding::NONE,
            target_rows: upload(&target_rows, device)?,
            targets: upload(&targets, device)?,
            tokens: own(self.tokens)?,
            row_keys: self.row_keys.map(own).transpose()?,
            routes: routes_of(&routes, self.route_size, device)?,
            router: None,
            packing,
            extremes: self.extremes,
            temperature: self.temperature,
            adapters: self.adapters,
            teacher: None,
            turn: None,
            slice: Some(slice),
        })
    }
}

/// Returns `width` values of each row of `pieces`, with `padding` behind the last row.
fn own_rows<T: Copy>(values: &[T], width: usize, padding: T, pieces: &[Range<usize>]) -> Vec<T> {
    let of_piece = |piece: &Range<usize>| piece.start * width..piece.end * width;
    pieces.iter().flat_map(of_piece).map(|index| values.get(index).copied().unwrap_or(padding)).collect()
}

/// Number of experts in a value of a message.
const ROUTES_OF_A_WORD: usize = 4;

/// Packs experts into the values of a message, the last one with zeros.
fn in_words(experts: &[i16]) -> Vec<i64> {
    let word = |experts: &[i16]| {
        experts.iter().rev().fold(0, |word, &expert| word << 16 | i64::from(expert.cast_unsigned()))
    };
    experts.chunks(ROUTES_OF_A_WORD).map(word).collect()
}

/// Unpacks the first `count` experts.
fn from_words(words: &[i64], count: usize) -> Vec<i16> {
    let of_word = |word: &i64| [0, 16, 32, 48].map(|bits| (word >> bits) as i16);
    words.iter().flat_map(of_word).take(count).collect()
}

/// Returns the routes of rows, `[N, layers, J]`; `None` if there are none.
fn routes_of(experts: &[i16], [layers, per_token]: [i64; 2], device: Device) -> Result<Option<Tensor>> {
    if layers == 0 {
        return Ok(None);
    }
    Ok(Some(upload(experts, device)?.f_view([-1, layers, per_token])?))
}

/// Places of a batch's targets among those of its ranks.
struct Places {
    /// See [`Slice`].
    own: Vec<i64>,
    places: Vec<i64>,
    padded: i64,
}

impl Places {
    /// A target belongs to the rank of its row.
    fn new(target_rows: &[i64], division: Division, (rank, ranks): (usize, usize)) -> Places {
        let mut counts = vec![0; ranks];
        let place = |&row: &i64| {
            let (of, _) = division.place(row as usize);
            counts[of] += 1;
            (of, counts[of] - 1)
        };
        let of_targets: Vec<(usize, i64)> = target_rows.iter().map(place).collect();
        let padded = counts.into_iter().max().unwrap_or(0);
        let own = (0..).zip(&of_targets).filter(|(_, (of, _))| *of == rank).map(|(target, _)| target);
        Places {
            own: own.collect(),
            places: of_targets.iter().map(|(of, place)| *of as i64 * padded + place).collect(),
            padded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sequence;

    #[test]
    fn a_message_arrives_as_it_was_sent() {
        let mut message = Message {
            temperature: 0.7,
            adapters: true,
            extremes: Some([3, 9]),
            lengths: vec![3, 0, 2],
            rows: vec![0, 1, 2, 0, 3],
            tokens: vec![9, 8, 7, 3],
            row_keys: Some(vec![1, -2, 3, 4]),
            // Three experts in each of two layers: 24 of them, and then 12, which end within a word.
            routes: (0..24).map(|index| index * 1200 - 1).collect(),
            route_size: [2, 3],
            target_rows: vec![1, 2, 3],
            targets: vec![5, 6, 4],
        };
        assert_eq!(Message::decoded(&message.encoded()), message);
        (message.row_keys, message.extremes) = (None, None);
        (message.routes, message.route_size) = ((0..4).map(|it| -it).collect(), [1, 1]);
        assert_eq!(Message::decoded(&message.encoded()), message);
        message.tokens.push(2);
        message.routes.push(i16::MAX);
        assert_eq!(Message::decoded(&message.encoded()), message);
        (message.routes, message.route_size) = (Vec::new(), [0, 0]);
        // Behind a shorter message is padding.
        assert_eq!(Message::decoded(&[message.encoded(), vec![0; 4]].concat()), message);
    }

    #[test]
    fn padding_is_not_sent() {
        let sequences = [[1, 2, 3, 4], [1, 2, 3, 5]];
        let sequences = sequences.each_ref().map(|tokens| Sequence { tokens, prompt_len: 3 });
        let sent = |padding| {
            let at = (Device::Cpu, padding);
            let batch = PackedBatch::pack(&sequences, true, 1.0, at).unwrap().keeping(&[0]).unwrap();
            Message::of(&batch).unwrap()
        };
        assert_eq!(sent(Padding::DEVICE), sent(Padding::NONE));
    }

    #[test]
    fn targets_find_their_places_among_those_of_all_ranks() {
        // The second rank has rows 2 and 3, and most targets. The third has none.
        let division = Division::new(5, 3, false);
        let Places { own, places, padded } = Places::new(&[0, 2, 3, 1, 3], division, (1, 3));
        assert_eq!((own, padded), (vec![1, 2, 4], 3));
        assert_eq!(places, [0, 3, 4, 1, 5]);
        // In pieces of one row the second rank has rows 1 and 4.
        let Places { own, places, .. } = Places::new(&[0, 2, 3, 1, 4], Division::new(5, 3, true), (1, 3));
        assert_eq!((own, places), (vec![3, 4], vec![0, 4, 5, 2, 3]));
    }

    /// Each row is on one rank, where it says that it is.
    #[test]
    fn rows_are_divided_among_ranks() {
        for (rows, ranks, is_mirrored) in [(12, 3, false), (12, 3, true), (7, 2, true), (1, 4, true)] {
            let division = Division::new(rows, ranks, is_mirrored);
            let mut found = Vec::new();
            for rank in 0..ranks {
                let own: Vec<usize> = division.pieces(rank).into_iter().flatten().collect();
                assert_eq!(own.len(), division.own());
                assert!(own.iter().enumerate().all(|(place, &row)| division.place(row) == (rank, place)));
                // Padding is behind a rank's rows.
                assert!(own.is_sorted());
                found.extend(own);
            }
            found.sort_unstable();
            assert!(found.iter().copied().eq(0..found.len()) && found.len() >= rows);
        }
        assert_eq!(own_rows(&[0, 1, 2, 3, 4, 5], 2, -1, &[1..2, 2..4]), [2, 3, 4, 5, -1, -1]);
    }
}
