//! A transport chosen at run time: a box of one is one.

use super::{
    AgentName, Descriptor, ListId, MemoryType, RegistrationId, Telemetry, TransferId, TransferOp,
    TransferState, Transport, TransportError, sealed,
};

impl<T: Transport + ?Sized> sealed::Sealed for Box<T> {}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn agent_metadata(&self) -> Vec<u8> {
        (**self).agent_metadata()
    }

    fn register_memory(
        &mut self,
        memory: MemoryType,
        ranges: &[Descriptor],
    ) -> Result<RegistrationId, TransportError> {
        (**self).register_memory(memory, ranges)
    }

    fn deregister_memory(&mut self, registration: RegistrationId) -> Result<(), TransportError> {
        (**self).deregister_memory(registration)
    }

    fn add_remote_agent(&mut self, metadata: &[u8]) -> Result<AgentName, TransportError> {
        (**self).add_remote_agent(metadata)
    }

    fn remove_remote_agent(&mut self, agent: &AgentName) -> Result<(), TransportError> {
        (**self).remove_remote_agent(agent)
    }

    fn knows_remote_agent(&mut self, agent: &AgentName) -> bool {
        (**self).knows_remote_agent(agent)
    }

    fn prepare_local(
        &mut self,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        (**self).prepare_local(memory, descriptors)
    }

    fn prepare_remote(
        &mut self,
        agent: &AgentName,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        (**self).prepare_remote(agent, memory, descriptors)
    }

    fn release_list(&mut self, list: ListId) -> Result<(), TransportError> {
        (**self).release_list(list)
    }

    fn make_transfer(
        &mut self,
        op: TransferOp,
        local: (ListId, &[u64]),
        remote: (ListId, &[u64]),
        notification: Option<&[u8]>,
    ) -> Result<TransferId, TransportError> {
        (**self).make_transfer(op, local, remote, notification)
    }

    fn post(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        (**self).post(transfer)
    }

    fn poll(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        (**self).poll(transfer)
    }

    fn telemetry(&mut self, transfer: TransferId) -> Option<Telemetry> {
        (**self).telemetry(transfer)
    }

    fn release_transfer(&mut self, transfer: TransferId) -> Result<(), TransportError> {
        (**self).release_transfer(transfer)
    }

    fn send_notification(&mut self, agent: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        (**self).send_notification(agent, message)
    }

    fn take_notifications(&mut self) -> Vec<(AgentName, Vec<u8>)> {
        (**self).take_notifications()
    }
}
