//! Finding and loading the NIXL library, and the proof that calling it is safe.
//!
//! The binding aborts the process when the library or one of its functions is missing, so nothing
//! else in this module may call it without a [`NixlLibrary`]. A loaded library stays loaded.

#![allow(unsafe_code, reason = "loads a foreign library")]

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::config::{LibrarySource, NixlError, NixlVersion};

const FILE_NAME: &str = "libnixl_capi.so";
/// Where the wheels of PyPI keep the library, below the folder they are installed in.
const WHEEL_FOLDERS: [&str; 2] = [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"];
/// Opens nothing new (glibc and musl agree on the value).
const RTLD_NOLOAD: i32 = 4;

/// Every function the transport calls; an older library lacks some.
const FUNCTIONS: [&str; 42] = [
    "nixl_capi_check_remote_md",
    "nixl_capi_create_backend",
    "nixl_capi_create_configured_agent",
    "nixl_capi_create_notif_map",
    "nixl_capi_create_opt_args",
    "nixl_capi_create_params",
    "nixl_capi_create_reg_dlist",
    "nixl_capi_create_xfer_dlist",
    "nixl_capi_deregister_mem",
    "nixl_capi_destroy_agent",
    "nixl_capi_destroy_backend",
    "nixl_capi_destroy_mem_list",
    "nixl_capi_destroy_notif_map",
    "nixl_capi_destroy_opt_args",
    "nixl_capi_destroy_params",
    "nixl_capi_destroy_reg_dlist",
    "nixl_capi_destroy_xfer_dlist",
    "nixl_capi_destroy_xfer_req",
    "nixl_capi_gen_notif",
    "nixl_capi_get_local_md",
    "nixl_capi_get_notifs",
    "nixl_capi_get_plugin_params",
    "nixl_capi_get_xfer_status",
    "nixl_capi_get_xfer_telemetry",
    "nixl_capi_invalidate_remote_md",
    "nixl_capi_load_remote_md",
    "nixl_capi_make_xfer_req",
    "nixl_capi_notif_map_get_agent_at",
    "nixl_capi_notif_map_get_notif",
    "nixl_capi_notif_map_get_notifs_size",
    "nixl_capi_notif_map_size",
    "nixl_capi_opt_args_set_has_notif",
    "nixl_capi_opt_args_set_notif_msg",
    "nixl_capi_params_add",
    "nixl_capi_post_xfer_req",
    "nixl_capi_prep_xfer_dlist",
    "nixl_capi_reg_dlist_add_desc",
    "nixl_capi_reg_dlist_clear",
    "nixl_capi_register_mem",
    "nixl_capi_release_xfer_dlist_handle",
    "nixl_capi_release_xfer_req",
    "nixl_capi_xfer_dlist_clear",
];

/// The loaded library; holding one means that the binding's calls cannot abort.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlLibrary {
    path: PathBuf,
    version: Option<NixlVersion>,
}

impl NixlLibrary {
    /// Loads the library from `source`; loading it again gives the same one.
    ///
    /// # Errors
    /// No library there, one that cannot be loaded or lacks functions, or another that this
    /// process has loaded before.
    pub fn load(source: &LibrarySource) -> Result<Self, NixlError> {
        let path = locate(source)?;
        let open = |name: &Path, flags: i32| {
            // SAFETY: the initialisers of NIXL and of what it links run here; they set up static
            // tables only. The caller names a NIXL library, which is what this type is about.
            unsafe { Library::open(Some(name), flags) }
        };
        let loaded_before = open(Path::new(FILE_NAME), RTLD_NOW | RTLD_NOLOAD);
        if loaded_before.is_ok() && open(&path, RTLD_NOW | RTLD_NOLOAD).is_err() {
            return Err(NixlError::OtherLibraryLoaded { path });
        }
        let library = open(&path, RTLD_NOW | RTLD_LOCAL).map_err(|error| NixlError::NotAvailable {
            reason: format!("{} cannot be loaded: {error}", path.display()),
        })?;
        for function in FUNCTIONS {
            // SAFETY: the symbol is looked up and never called through this pointer.
            if unsafe { library.get::<*const ()>(function.as_bytes()) }.is_err() {
                return Err(NixlError::FunctionMissing { path, function });
            }
        }
        // NIXL has threads and exit handlers: it is never unloaded.
        std::mem::forget(library);
        // The binding now finds it by its file name; this call alone is safe without a library.
        if nixl_sys::is_stub() {
            let reason = format!("{} is loaded but the binding does not find it", path.display());
            return Err(NixlError::NotAvailable { reason });
        }
        let version = installed_version(&path);
        Ok(Self { path, version })
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, when it was installed as a wheel.
    pub fn version(&self) -> Option<NixlVersion> {
        self.version
    }
}

fn locate(source: &LibrarySource) -> Result<PathBuf, NixlError> {
    let candidates: Vec<PathBuf> = match source {
        LibrarySource::Path(path) => vec![path.clone()],
        LibrarySource::Folders(folders) => folders.iter().flat_map(|folder| in_folder(folder)).collect(),
    };
    let found = candidates.iter().find(|path| path.is_file());
    let path = found.ok_or_else(|| {
        let places: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
        let reason = match &places[..] {
            [] => "nobody said where it is".to_owned(),
            places => format!("no library at {}", places.join(", ")),
        };
        NixlError::NotAvailable { reason }
    })?;
    path.canonicalize().map_err(|error| NixlError::NotAvailable {
        reason: format!("{} cannot be read: {error}", path.display()),
    })
}

fn in_folder(folder: &Path) -> Vec<PathBuf> {
    let wheels = WHEEL_FOLDERS.iter().map(|wheel| folder.join(wheel).join(FILE_NAME));
    std::iter::once(folder.join(FILE_NAME)).chain(wheels).collect()
}

/// The version in the name of the wheel's `nixl_cu12-1.5.1.dist-info` beside the library's folder.
fn installed_version(library: &Path) -> Option<NixlVersion> {
    let folder = library.parent()?;
    let wheel = folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
    let entries = std::fs::read_dir(folder.parent()?).ok()?;
    entries.filter_map(Result::ok).find_map(|entry| {
        let name = entry.file_name();
        let version = name.to_str()?.strip_prefix(wheel)?.strip_prefix('-')?.strip_suffix(".dist-info")?;
        NixlVersion::parse(version)
    })
}

#[cfg(test)]
impl NixlLibrary {
    pub(super) fn forget_version(&mut self) {
        self.version = None;
    }
}
