//! Communicators made from communicators.

use anyroll_backends::{CollectiveGroup, DType, ReduceOp};

use super::member::Member;
use crate::{
    runner::{Case, Stop, Verdict, same, same_bytes},
    values::{random, reduce},
};

pub(super) fn cases() -> Vec<Case<Member>> {
    vec![
        Case::new("split: ranks of one color are a group", colors),
        Case::new("split: keys order the ranks, and equal keys leave them as they are", keys),
        Case::new("split: a rank without a color is left out", left_out),
        Case::new("split: a group that was split off can be split", nested),
        Case::new("split: the parent works on beside its children", beside),
    ]
}

fn colors(m: &Member) -> Verdict {
    let members: Vec<usize> = (m.rank % 2..m.world_size).step_by(2).collect();
    let group = member(m.group.split("halves", Some(m.rank as u32 % 2), 0)?)?;
    holds(m, &group, &members)
}

fn keys(m: &Member) -> Verdict {
    let all: Vec<usize> = (0..m.world_size).collect();
    let reversed: Vec<usize> = all.iter().rev().copied().collect();
    let group = member(m.group.split("reversed", Some(7), -(m.rank as i32))?)?;
    holds(m, &group, &reversed)?;
    let group = member(m.group.split("equal keys", Some(u32::MAX), -3)?)?;
    holds(m, &group, &all)
}

fn left_out(m: &Member) -> Verdict {
    let last = m.world_size - 1;
    let color = if m.rank == last { None } else { Some(0) };
    let group = m.group.split("without the last", color, 0)?;
    same("whether this rank is a member", group.is_some(), color.is_some())?;
    group.map_or(Ok(()), |group| holds(m, &group, &(0..last).collect::<Vec<_>>()))
}

fn nested(m: &Member) -> Verdict {
    let reversed = member(m.group.split("reversed", Some(0), -(m.rank as i32))?)?;
    // In the reversed group this rank is `world_size - 1 - rank`; its halves are by that number.
    let color = reversed.rank() % 2;
    let members: Vec<usize> = (color..m.world_size).step_by(2).map(|rank| m.world_size - 1 - rank).collect();
    let group = member(reversed.split("half of reversed", Some(color as u32), 0)?)?;
    drop(reversed); // a child does not need its parent
    holds(m, &group, &members)
}

fn beside(m: &Member) -> Verdict {
    let child = member(m.group.split("child", Some(0), 0)?)?;
    let everybody: Vec<usize> = (0..m.world_size).collect();
    holds(m, &child, &everybody)?;
    holds(m, &m.group, &everybody)?;
    drop(child);
    holds(m, &m.group, &everybody)
}

fn member(group: Option<CollectiveGroup>) -> Result<CollectiveGroup, Stop> {
    group.ok_or_else(|| Stop::Failed("a rank with a color is not a member".into()))
}

/// Fails unless `group` consists of `members` (ranks of the parent) in this order, and works.
fn holds(m: &Member, group: &CollectiveGroup, members: &[usize]) -> Verdict {
    let place = members.iter().position(|member| *member == m.rank);
    same("rank and world size", (Some(group.rank()), group.world_size()), (place, members.len()))?;
    let inputs: Vec<Vec<u8>> = members.iter().map(|rank| random(DType::F32, 101, *rank as u64)).collect();

    let input = m.place(&inputs[group.rank()], DType::F32)?;
    let output = m.place(&vec![0; 101 * 4 * members.len()], DType::F32)?;
    group.all_gather(&output.inner, &input.inner, &m.compute)?.wait()?;
    group.all_reduce(&input.inner, ReduceOp::Max, &m.compute)?.wait()?;
    same_bytes("all_gather", &output.read(&m.compute)?, &inputs.concat())?;
    let want = reduce(DType::F32, ReduceOp::Max, &inputs);
    same_bytes("all_reduce", &input.read(&m.compute)?, &want)
}
