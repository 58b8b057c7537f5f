//! Addresses whose physical memory comes and goes: the driver's virtual memory management.

use std::ops::Range;

use super::{
    context::Context,
    driver::{AccessDescription, Address, AllocationProperties, GRANULARITY_RECOMMENDED},
};
use crate::{Result, ffi::library::Failed, safe::stream::report};

/// Physical memory is made in pieces of this size: large ones are the fastest to map, and an arena that is a
/// little larger than what one piece could find still gets its memory.
const PIECE_BYTES: usize = 2 << 30;

/// Lengths of arenas are multiples of this.
pub(super) fn granularity_bytes(context: &Context) -> Result<usize> {
    let properties = AllocationProperties::on(context.device);
    let mut bytes = 0;
    // SAFETY: a number and a struct of our own.
    context.run(|driver| unsafe {
        driver.physical_granularity(&mut bytes, &properties, GRANULARITY_RECOMMENDED)
    })?;
    Ok(bytes)
}

pub(super) fn reserve(context: &Context, len: usize) -> Result<Address> {
    let _entered = context.enter()?;
    context.fits(len)?;
    let mut address = 0;
    // SAFETY: a number of our own; the driver chooses the place.
    unsafe { context.driver.address_reserve(&mut address, len, 0, 0, 0) }
        .map_err(|failed| context.memory_error(failed, len))?;
    Ok(address)
}

/// Maps fresh memory behind a reservation, all of it or nothing.
///
/// # Safety
/// `address` is a reservation of `len` bytes without memory.
pub(super) unsafe fn map(context: &Context, address: Address, len: usize) -> Result<()> {
    let _entered = context.enter()?;
    let mut mapped = 0;
    let outcome = pieces(len).try_for_each(|piece| {
        // SAFETY: the caller's promise; the piece lies in the reservation.
        unsafe { map_piece(context, address + piece.start as Address, piece.len())? };
        mapped = piece.end;
        Ok(())
    });
    let access = AccessDescription::by(context.device);
    // SAFETY: the whole range is mapped if the outcome is good so far.
    let outcome = outcome.and_then(|()| unsafe { context.driver.set_access(address, len, &access, 1) });
    outcome.map_err(|failed| {
        let error = context.memory_error(failed, len);
        // SAFETY: these pieces are mapped, and nothing knows of them yet.
        report(unsafe { unmap_pieces(context, address, mapped) }.map_err(|failed| context.error(failed)));
        error
    })
}

/// Gives the memory behind an arena back.
///
/// # Safety
/// `map` made it with this `len`, and no work uses it.
pub(super) unsafe fn unmap(context: &Context, address: Address, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    context.run(|_| unsafe { unmap_pieces(context, address, len) })
}

/// # Safety
/// `address` is a reservation of `len` bytes without memory, never used again.
pub(super) unsafe fn free(context: &Context, address: Address, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    context.run(|driver| unsafe { driver.address_free(address, len) })
}

/// # Safety
/// The range lies in a reservation, and nothing is mapped there.
unsafe fn map_piece(context: &Context, address: Address, len: usize) -> Result<(), Failed> {
    let properties = AllocationProperties::on(context.device);
    let mut physical = 0;
    // SAFETY: a number and a struct of our own.
    unsafe { context.driver.physical_create(&mut physical, len, &properties, 0)? };
    // SAFETY: the caller's range; `physical` is live.
    let mapped = unsafe { context.driver.map(address, len, 0, physical, 0) };
    // The mapping keeps the memory, so that to unmap it is to give it back, and no handle has to be remembered.
    // SAFETY: made above, and released once.
    let released = unsafe { context.driver.physical_release(physical) };
    mapped.and(released)
}

/// # Safety
/// The pieces of the first `len` bytes are mapped, and nothing uses them.
unsafe fn unmap_pieces(context: &Context, address: Address, len: usize) -> Result<(), Failed> {
    // All are given back, also after a failure.
    pieces(len)
        // SAFETY: the caller's promise; each is a whole mapping, as the driver asks for.
        .map(|piece| unsafe { context.driver.unmap(address + piece.start as Address, piece.len()) })
        .fold(Ok(()), Result::and)
}

fn pieces(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(PIECE_BYTES).map(move |start| start..len.min(start + PIECE_BYTES))
}
