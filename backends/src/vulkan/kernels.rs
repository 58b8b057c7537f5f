//! The kernels of `kernels/strategy.wgsl`, and how they are dispatched; `launch` knows what each gets.
//!
//! A launch names memory by address, as on other devices. Here that becomes a range of a buffer which a shader may see: it
//! begins where the device allows a range to begin, and what is in front of the first element is skipped by index.

use std::{
    collections::HashMap,
    ffi::{CStr, c_void},
    sync::Arc,
};

use ash::vk;

use super::{
    context::Context,
    launch::Launch,
    memory::{Block, Memory, Place},
    shader,
    stream::{Kept, Recording},
};
use crate::{Error, Result, device::unsupported};

const COMMON: &str = include_str!("../../kernels/strategy.wgsl");
const WITH_F64: &str = include_str!("../../kernels/strategy_f64.wgsl");
const WITHOUT_F64: &str = include_str!("../../kernels/strategy_f32.wgsl");

/// Entry points of [`COMMON`], and those that [`WITH_F64`] adds.
const ENTRIES: [&CStr; 8] =
    [c"reduce_floats", c"reduce_i32", c"reduce_i64", c"reduce_u8", c"sum_ranks", c"adamw", c"scale", c"fill"];
/// See above.
const F64_ENTRIES: [&CStr; 2] = [c"sum_squares", c"sum_partial"];

/// Buffers of a kernel, at most.
const BUFFERS: usize = 5;
/// Threads of a workgroup.
pub(super) const THREADS: usize = 256;
/// Elements of a workgroup of `sum_squares`.
pub(super) const CHUNK: usize = 16384;

/// `Arguments` of the shader.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arguments {
    pub(super) n: u32,
    pub(super) ranks: u32,
    pub(super) stride: u32,
    pub(super) op: u32,
    pub(super) kind: u32,
    pub(super) to_kind: u32,
    /// Filled in when the buffers are shown to the shader.
    pub(super) at: [u32; BUFFERS],
    pub(super) learning_rate: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) eps: f32,
    pub(super) keep: f32,
}

/// Element types, with the numbers of the shader's floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32 = 0,
    Bf16 = 1,
    F16 = 2,
    I32,
    I64,
    U8,
    F64,
}

impl Kind {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I64 | Self::F64 => 8,
            Self::U8 => 1,
        }
    }
}

/// Elements that a kernel reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Elements {
    pub(super) place: Place,
    pub(super) kind: Kind,
    pub(super) len: usize,
}

impl Elements {
    /// `len` elements from number `from` on.
    pub(super) fn slice(self, from: usize, len: usize) -> Self {
        let skipped = (from * self.kind.bytes()) as u64;
        let place =
            Place { offset: self.place.offset + skipped, len: self.place.len - skipped, ..self.place };
        Self { place, len, ..self }
    }

    pub(super) fn bytes(self) -> usize {
        self.len * self.kind.bytes()
    }

    /// Returns true if they are whole words, the unit that a shader writes.
    fn is_words(self) -> bool {
        self.place.offset.is_multiple_of(4) && self.bytes().is_multiple_of(4)
    }
}

/// The compiled kernels of one device.
pub(super) struct Kernels {
    pipelines: HashMap<&'static CStr, vk::Pipeline>,
    layout: vk::PipelineLayout,
    sets: vk::DescriptorSetLayout,
    pub(super) context: Arc<Context>,
}

/// A launch: the work of a stream, in order, and the memory to release after it.
pub(super) struct Work {
    pub(super) recording: Recording,
    pub(super) kept: Kept,
    pub(super) scratch: Option<Block>,
}

/// One dispatch: an entry point, its buffers in the order of their bindings, and its numbers.
pub(super) struct Dispatch {
    pub(super) entry: &'static CStr,
    pub(super) buffers: Vec<Elements>,
    pub(super) arguments: Arguments,
    pub(super) groups: usize,
}

impl Kernels {
    /// Compiles all.
    pub(super) fn compile(context: &Arc<Context>) -> Result<Self> {
        let has_f64 = context.physical.has_f64;
        let source = [COMMON, if has_f64 { WITH_F64 } else { WITHOUT_F64 }].concat();
        let words = shader::compile(&source).map_err(|message| {
            // The source is ours, and a test compiles it: what fails is this build.
            Error::Unsupported { backend: context.id.backend, what: format!("its kernels: {message}") }
        })?;
        let device = &context.device;
        let error = |call| move |code| context.error(call, code);
        let bindings: Vec<_> = (0..BUFFERS as u32)
            .map(|binding| {
                vk::DescriptorSetLayoutBinding::default()
                    .binding(binding)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .descriptor_count(1)
                    .stage_flags(vk::ShaderStageFlags::COMPUTE)
            })
            .collect();
        let description = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: here and below, descriptions live through their calls, and `drop` gives back what is made.
        let sets = unsafe { device.create_descriptor_set_layout(&description, None) }
            .map_err(error("vkCreateDescriptorSetLayout"))?;
        let mut kernels = Self {
            pipelines: HashMap::new(),
            layout: vk::PipelineLayout::null(),
            sets,
            context: context.clone(),
        };
        let (layouts, ranges) = (
            [sets],
            [vk::PushConstantRange::default()
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
                .size(size_of::<Arguments>() as u32)],
        );
        let description =
            vk::PipelineLayoutCreateInfo::default().set_layouts(&layouts).push_constant_ranges(&ranges);
        // SAFETY: as above.
        kernels.layout = unsafe { device.create_pipeline_layout(&description, None) }
            .map_err(error("vkCreatePipelineLayout"))?;
        let description = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: as above; the words are valid SPIR-V for what the device has.
        let module = unsafe { device.create_shader_module(&description, None) }
            .map_err(error("vkCreateShaderModule"))?;
        let f64_entries: &[&CStr] = if has_f64 { &F64_ENTRIES } else { &[] };
        let made = ENTRIES.iter().chain(f64_entries).try_for_each(|entry| {
            kernels.pipelines.insert(entry, pipeline(context, module, kernels.layout, entry)?);
            Ok(())
        });
        // SAFETY: pipelines do not need it any more.
        unsafe { device.destroy_shader_module(module, None) };
        made.map(|()| kernels)
    }

    /// The work of a launch; `None` for one on no elements.
    ///
    /// # Safety
    /// `arguments` are the addresses of the values of the kernel's parameters.
    pub(super) unsafe fn prepare(
        self: &Arc<Self>,
        memory: &Memory,
        kernel: &'static CStr,
        arguments: &[*mut c_void],
    ) -> Result<Option<Work>> {
        // SAFETY: the caller's promise.
        let mut dispatches = unsafe { Launch { kernels: self, memory, arguments }.dispatches(kernel)? };
        if dispatches.is_empty() {
            return Ok(None);
        }
        let (scratch, copies) = divert(memory, &mut dispatches)?.unzip();
        let (sets, ready) = match self.bind_all(&dispatches) {
            Ok(bound) => bound,
            Err(error) => {
                scratch.into_iter().for_each(|block| memory.release(block));
                return Err(error);
            }
        };
        let layout = self.layout;
        let recording = move |device: &ash::Device, commands| {
            for Ready { pipeline, set, arguments, groups } in ready {
                let (compute, stage) = (vk::PipelineBindPoint::COMPUTE, vk::ShaderStageFlags::COMPUTE);
                // SAFETY: all is live until the submission is done, and the windows hold what the shader touches.
                unsafe {
                    device.cmd_bind_pipeline(commands, compute, pipeline);
                    device.cmd_bind_descriptor_sets(commands, compute, layout, 0, &[set], &[]);
                    device.cmd_push_constants(commands, layout, stage, 0, arguments.bytes());
                    device.cmd_dispatch(commands, groups, 1, 1);
                }
            }
            if let Some(Copies { from, to, regions }) = copies {
                let written = [vk::MemoryBarrier::default()
                    .src_access_mask(vk::AccessFlags::SHADER_WRITE)
                    .dst_access_mask(vk::AccessFlags::TRANSFER_READ)];
                let (shader, transfer) =
                    (vk::PipelineStageFlags::COMPUTE_SHADER, vk::PipelineStageFlags::TRANSFER);
                let none = vk::DependencyFlags::empty();
                // SAFETY: as above.
                unsafe {
                    device.cmd_pipeline_barrier(commands, shader, transfer, none, &written, &[], &[]);
                    device.cmd_copy_buffer(commands, from, to, &regions);
                }
            }
        };
        Ok(Some(Work { recording: Box::new(recording), kept: Arc::new(sets), scratch }))
    }

    fn bind_all(self: &Arc<Self>, dispatches: &[Dispatch]) -> Result<(Sets, Vec<Ready>)> {
        let sets = Sets::new(self, dispatches.len())?;
        let pairs = dispatches.iter().zip(&sets.all);
        let ready = pairs.map(|(dispatch, set)| self.bind(dispatch, *set)).collect::<Result<_>>()?;
        Ok((sets, ready))
    }

    /// Shows a dispatch its buffers.
    fn bind(&self, dispatch: &Dispatch, set: vk::DescriptorSet) -> Result<Ready> {
        let mut arguments = dispatch.arguments;
        let mut infos = Vec::new();
        for (number, elements) in dispatch.buffers.iter().enumerate() {
            let (info, first) = self.window(*elements)?;
            arguments.at[number] = first;
            infos.push([info]);
        }
        let writes: Vec<_> = (0u32..)
            .zip(&infos)
            .map(|(binding, info)| {
                vk::WriteDescriptorSet::default()
                    .dst_set(set)
                    .dst_binding(binding)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .buffer_info(info)
            })
            .collect();
        // SAFETY: a fresh set, and buffers that are live.
        unsafe { self.context.device.update_descriptor_sets(&writes, &[]) };
        let most = self.context.physical.limits.max_compute_work_group_count[0] as usize;
        let groups = dispatch.groups.clamp(1, most) as u32;
        Ok(Ready { pipeline: self.pipelines[dispatch.entry], set, arguments, groups })
    }

    /// The range that a shader sees, and the number of its first element there.
    fn window(&self, elements: Elements) -> Result<(vk::DescriptorBufferInfo, u32)> {
        let start = elements.place.offset / self.alignment() * self.alignment();
        let skipped = (elements.place.offset - start) as usize;
        // The shader counts 64-bit integers in words.
        let unit = if elements.kind == Kind::I64 { 4 } else { elements.kind.bytes() };
        let bytes = (skipped + elements.bytes()).next_multiple_of(4);
        let refuse = |why: String| unsupported(self.context.id, format!("a kernel on {why}"));
        if !skipped.is_multiple_of(unit) {
            return refuse(format!("{:?} at an address that is no multiple of {unit}", elements.kind));
        }
        if bytes > self.largest_window() {
            return refuse(format!(
                "{bytes} bytes at once: the driver shows it {} at most",
                self.largest_window()
            ));
        }
        let info =
            vk::DescriptorBufferInfo { buffer: elements.place.buffer, offset: start, range: bytes as u64 };
        Ok((info, (skipped / unit) as u32))
    }

    /// Windows begin at multiples of it.
    fn alignment(&self) -> u64 {
        self.context.physical.limits.min_storage_buffer_offset_alignment.max(16)
    }

    fn largest_window(&self) -> usize {
        // Indices are 32 bits, of bytes at the smallest.
        self.context.physical.limits.max_storage_buffer_range.min(1 << 31) as usize
    }

    /// Most elements of one dispatch if the widest have `bytes` each: a multiple of [`CHUNK`].
    pub(super) fn most_elements(&self, bytes: usize) -> usize {
        const MOST_GROUPS: usize = 65_535; // the least that a device allows
        let shown = (self.largest_window() - self.alignment() as usize) / bytes;
        shown.min(MOST_GROUPS * CHUNK) / CHUNK * CHUNK
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let device = &self.context.device;
        // SAFETY: every submission that names them holds on to this until it is done.
        unsafe {
            self.pipelines.values().for_each(|pipeline| device.destroy_pipeline(*pipeline, None));
            device.destroy_pipeline_layout(self.layout, None);
            device.destroy_descriptor_set_layout(self.sets, None);
        }
    }
}

impl Arguments {
    fn bytes(&self) -> &[u8] {
        let len = size_of::<Self>();
        // SAFETY: numbers of 32 bits without anything between them.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), len) }
    }
}

fn pipeline(
    context: &Context,
    module: vk::ShaderModule,
    layout: vk::PipelineLayout,
    entry: &CStr,
) -> Result<vk::Pipeline> {
    let stage = vk::PipelineShaderStageCreateInfo::default()
        .stage(vk::ShaderStageFlags::COMPUTE)
        .module(module)
        .name(entry);
    let description = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(layout)];
    let cache = vk::PipelineCache::null();
    // SAFETY: the description lives through the call; `Kernels` gives the pipeline back.
    let made = unsafe { context.device.create_compute_pipelines(cache, &description, None) };
    Ok(made.map_err(|(_, code)| context.error("vkCreateComputePipelines", code))?[0])
}

/// A dispatch that can be recorded.
struct Ready {
    pipeline: vk::Pipeline,
    set: vk::DescriptorSet,
    arguments: Arguments,
    groups: u32,
}

/// The sets of one launch, and the kernels that they are for.
struct Sets {
    pool: vk::DescriptorPool,
    all: Vec<vk::DescriptorSet>,
    kernels: Arc<Kernels>,
}

impl Sets {
    fn new(kernels: &Arc<Kernels>, count: usize) -> Result<Self> {
        let context = &kernels.context;
        let sizes = [vk::DescriptorPoolSize::default()
            .ty(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count((count * BUFFERS) as u32)];
        let description = vk::DescriptorPoolCreateInfo::default().max_sets(count as u32).pool_sizes(&sizes);
        // SAFETY: the description lives through the call; given back in `drop`, with the sets.
        let pool = unsafe { context.device.create_descriptor_pool(&description, None) }
            .map_err(|code| context.error("vkCreateDescriptorPool", code))?;
        let mut sets = Self { pool, all: Vec::new(), kernels: kernels.clone() };
        let layouts = vec![kernels.sets; count];
        let description =
            vk::DescriptorSetAllocateInfo::default().descriptor_pool(pool).set_layouts(&layouts);
        // SAFETY: as above.
        sets.all = unsafe { context.device.allocate_descriptor_sets(&description) }
            .map_err(|code| context.error("vkAllocateDescriptorSets", code))?;
        Ok(sets)
    }
}

impl Drop for Sets {
    fn drop(&mut self) {
        // SAFETY: the submission that uses the sets holds on to this until it is done.
        unsafe { self.kernels.context.device.destroy_descriptor_pool(self.pool, None) };
    }
}

/// Copies of results from a kernel's own memory to their destination.
struct Copies {
    from: vk::Buffer,
    to: vk::Buffer,
    regions: Vec<vk::BufferCopy>,
}

/// Lets kernels write to other memory first where what they write is not whole words: what else lies in a word may be
/// somebody else's.
fn divert(memory: &Memory, dispatches: &mut [Dispatch]) -> Result<Option<(Block, Copies)>> {
    const ALIGNMENT: usize = 256;
    if dispatches.iter().all(|dispatch| dispatch.buffers[0].is_words()) {
        return Ok(None);
    }
    let padded = |dispatch: &Dispatch| dispatch.buffers[0].bytes().next_multiple_of(ALIGNMENT);
    let block = memory.scratch(dispatches.iter().map(padded).sum())?;
    let to = dispatches[0].buffers[0].place.buffer;
    let (mut regions, mut offset) = (Vec::new(), 0);
    for dispatch in dispatches {
        let len = padded(dispatch) as u64;
        let output = &mut dispatch.buffers[0];
        let size = output.bytes() as u64;
        regions.push(vk::BufferCopy { src_offset: offset, dst_offset: output.place.offset, size });
        output.place = Place { buffer: block.buffer, offset, len };
        offset += len;
    }
    let from = block.buffer;
    Ok(Some((block, Copies { from, to, regions })))
}
