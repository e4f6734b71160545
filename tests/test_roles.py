"""Process indexes, roles and names of one host."""

from danube_fast.roles import COORDINATOR, Processes, Role


def test_every_process_has_a_role_a_number_and_a_name():
    processes = Processes.with_workers(3)
    assert processes.roles[COORDINATOR] is Role.COORDINATOR
    assert processes.workers == [1, 2, 3]
    assert [processes.number(process) for process in processes.workers] == [0, 1, 2]
    names = [processes.name(process) for process in range(len(processes))]
    assert names == ["coordinator", "worker-0", "worker-1", "worker-2"]


def test_a_role_that_comes_later_moves_no_worker():
    processes = Processes((Role.COORDINATOR, Role.WORKER, Role.COORDINATOR, Role.WORKER))
    assert processes.workers == [1, 3]
    assert processes.number(3) == 1
