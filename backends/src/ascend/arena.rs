//! Addresses whose physical memory comes and goes.

use std::{collections::HashMap, ffi::c_void, ptr, sync::Mutex};

use super::{
    acl::{GRANULARITY_RECOMMENDED, HUGE_PAGES, Handle, PhysicalProperties},
    context::Context,
};
use crate::{Result, ffi::library::Failed, safe::stream::report};

/// The physical memory behind each arena that is mapped, by the arena's address: unlike other drivers, this one wants
/// it back by its handle.
#[derive(Debug, Default)]
pub(super) struct Arenas(Mutex<HashMap<u64, Handle>>);

/// Lengths of arenas are multiples of this.
pub(super) fn granularity_bytes(context: &Context) -> Result<usize> {
    let mut properties = PhysicalProperties::on(context.id.ordinal as i32);
    let mut bytes = 0;
    // SAFETY: a number and a struct of our own.
    context.run(|acl| unsafe {
        acl.physical_granularity(&mut properties, GRANULARITY_RECOMMENDED, &mut bytes)
    })?;
    Ok(bytes)
}

pub(super) fn reserve(context: &Context, len: usize) -> Result<u64> {
    let _entered = context.enter()?;
    context.fits(len)?;
    let mut address = ptr::null_mut();
    // SAFETY: an address of our own; the driver chooses the place.
    unsafe { context.acl.address_reserve(&mut address, len, 0, ptr::null_mut(), HUGE_PAGES) }
        .map_err(|failed| context.memory_error(failed, len))?;
    Ok(address as u64)
}

/// # Safety
/// `address` is a reservation without memory, never used again.
pub(super) unsafe fn free(context: &Context, address: u64) -> Result<()> {
    // SAFETY: the caller's promise.
    context.run(|acl| unsafe { acl.address_release(at(address)) })
}

impl Arenas {
    /// Maps fresh memory behind a whole reservation.
    ///
    /// # Safety
    /// `address` is a reservation of `len` bytes without memory.
    pub(super) unsafe fn map(&self, context: &Context, address: u64, len: usize) -> Result<()> {
        let _entered = context.enter()?;
        let acl = context.acl;
        let properties = PhysicalProperties::on(context.id.ordinal as i32);
        let mut physical = 0;
        // SAFETY: a number and a struct of our own.
        unsafe { acl.physical_malloc(&mut physical, len, &properties, 0) }
            .map_err(|failed| context.memory_error(failed, len))?;
        // SAFETY: the caller's reservation; the memory was made above.
        if let Err(failed) = unsafe { acl.map(at(address), len, 0, physical, 0) } {
            let error = context.memory_error(failed, len);
            // SAFETY: made above, and not mapped.
            report(unsafe { acl.physical_free(physical) }.map_err(|failed| context.error(failed)));
            return Err(error);
        }
        self.0.lock().unwrap().insert(address, physical);
        Ok(())
    }

    /// Gives the memory behind an arena back.
    ///
    /// # Safety
    /// `map` made it, and no work uses it.
    pub(super) unsafe fn unmap(&self, context: &Context, address: u64) -> Result<()> {
        let physical = self.0.lock().unwrap().remove(&address).expect("the caller has mapped it");
        context.run(|acl| {
            // SAFETY: the caller's promise. The memory goes also where the address does not.
            let (unmapped, freed): (Result<(), Failed>, _) =
                unsafe { (acl.unmap(at(address)), acl.physical_free(physical)) };
            unmapped.and(freed)
        })
    }
}

fn at(address: u64) -> *mut c_void {
    address as *mut c_void
}
