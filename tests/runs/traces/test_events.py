"""What is made of torch.profiler's events: names by order and size, rows that nest, and one clock."""

from dtensor.comm.profiled import WAIT, Graph, name_of
from dtensor.runs.traces.events import STEP, exposed, nested, rewritten
from dtensor.runs.traces.merging import later, merged


def op(name, ts, dur, dims=None, inputs=(), cat="cpu_op", **more):
    args = {"External id": ts} | ({} if dims is None else {"Input Dims": [dims], "Concrete Inputs": ["", *inputs]})
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 1, "ts": ts, "dur": dur, "args": args, **more}


def described(of, elements, carried="all_gather_start", op="all_gather"):
    stage = {"line": "train.py:9", "stage": "forward", "graph": "f"}
    return {"op": op, "move": "S(0)->R", "axis": "dp", "of": of, "carried": carried, "elements": elements, **stage}


FORWARD = "dtensor graph: forward of f"


def test_collectives_of_a_graph_are_named_by_order_and_size():
    graph = Graph("forward of f", [described("a", 4), described("b", 6), described("c", 4)])
    made = rewritten(
        [
            op("CompiledFunction", 0, 100),
            op("dtensor::agree", 1, 2),
            op(FORWARD, 1, 1, cat="user_annotation"),
            op("dtensor::all_gather_start", 10, 2, [6], ["2"]),  # the compiler moved it in front of "a"
            op("dtensor::all_gather_start", 20, 2, [2, 2], ["2"]),
            op("_c10d_functional::wait_tensor", 30, 5, [8]),
            op("_c10d_functional::wait_tensor", 40, 5, [12]),
            op("dtensor::all_gather_start", 50, 2, [4], ["2"]),
            op("_c10d_functional::wait_tensor", 60, 5, [8]),
            op("dtensor::all_gather_start", 110, 2, [4], ["2"]),  # of no graph
        ],
        {},
        {FORWARD: graph},
    )
    names = {of: f"all_gather S(0)->R over dp: {of} (train.py:9)" for of in "abc"}
    said = {e["ts"]: e["name"] for e in made if e["ph"] == "X" and e["tid"] == 1}
    assert [said[k] for k in (10, 20, 50)] == [names[of] for of in "bac"]
    assert [said[k] for k in (30, 40, 60)] == [WAIT + names[of] for of in "abc"]
    assert said[110] == "all_gather"
    (inside,) = [e for e in made if e.get("cat") == "graph"]
    assert (inside["name"], inside["ts"], inside["ts"] + inside["dur"]) == ("forward of f", 1, 100)
    sent = [(e["name"], e["ts"], e["dur"], e["args"]["waited_us"]) for e in made if "waited_us" in e.get("args", {})]
    assert sent == [(names["b"], 10, 35, 5), (names["a"], 20, 15, 5), (names["c"], 50, 15, 5)]
    rows = {e["name"]: e["tid"] for e in made if "waited_us" in e.get("args", {})}
    assert rows[names["a"]] != rows[names["b"]] == rows[names["c"]], "what overlaps has a row of its own"
    assert nests(made)


def nests(events):
    rows = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append(dict(e))
    return not any(nested(row)[1] for row in rows.values())


def test_slices_that_overlap_have_rows_of_their_own():
    given = [op("step", 0, 50), op("gloo:recv", 1, 10, cat="user_annotation"), op("gloo:send", 2, 20)]
    assert not nests(given)
    made = rewritten(given, {}, {})
    assert nests(made)
    assert len({e["tid"] for e in made if e["ph"] == "X"}) == 2
    assert [e["args"]["name"] for e in made if e["name"] == "thread_name"] == ["gloo"]


def test_eager_collectives_keep_the_names_they_were_given():
    found = described("weight", None)
    name = name_of(found)
    made = rewritten(
        [
            op("dtensor::all_gather", 0, 20),
            op(name, 1, 5, cat="user_annotation"),
            op("dtensor::all_gather_start", 2, 3, [4], ["2"]),
            op(WAIT + name, 7, 9, cat="user_annotation"),
            op("_c10d_functional::wait_tensor", 8, 7, [8]),
        ],
        {name: found},
        {},
    )
    (sent,) = [e for e in made if "waited_us" in e.get("args", {})]
    assert (sent["name"], sent["ts"], sent["dur"], sent["args"]["waited_us"]) == (name, 1, 15, 9)
    assert [e["name"] for e in made if e["ph"] == "X" and e["ts"] in (2, 8)] == [
        "dtensor::all_gather_start",
        "_c10d_functional::wait_tensor",
    ]


def test_kernels_of_nccl_have_the_name_of_their_collective():
    graph = Graph("forward of f", [described("a", 4, "all_reduce", "all_reduce")])
    kernel = op("ncclDevKernel_AllReduce_Sum_f32", 12, 30, cat="kernel", pid=0, tid=7)
    kernel["args"] = {"External id": 11}
    other = op("gemm", 12, 30, cat="kernel", pid=0, tid=8)
    made = rewritten(
        [
            op("CompiledFunction", 0, 100),
            op("dtensor::agree", 1, 2),
            op(FORWARD, 1, 1, cat="user_annotation"),
            op("_c10d_functional::all_reduce_", 10, 5, [4], ["sum"]),
            op("c10d::allreduce_", 11, 3),
            kernel,
            other,
        ],
        {},
        {FORWARD: graph},
    )
    kernels = {e["tid"]: (e["name"], e["args"].get("kernel")) for e in made if e.get("cat") == "kernel"}
    assert kernels == {
        7: ("all_reduce S(0)->R over dp: a (train.py:9)", "ncclDevKernel_AllReduce_Sum_f32"),
        8: ("gemm", None),
    }


def test_a_step_ends_with_the_slice_that_it_is_marked_in():
    made = rewritten(
        [
            op("forward", 5, 10),
            op("Optimizer.step#AdamW.step", 20, 10),
            op(f"{STEP}step 0", 28, 0, cat="user_annotation"),
            op("forward", 40, 10),
            op("Optimizer.step#AdamW.step", 60, 10),
            op(f"{STEP}step 1", 68, 0, cat="user_annotation"),
        ],
        {},
        {},
    )
    assert [(e["name"], e["ts"], e["dur"]) for e in made if e.get("cat") == "step"] == [
        ("step 0", 5, 25),
        ("step 1", 30, 40),
    ]


def rank(number, host, base, *ends):
    """The trace of a rank whose all-reduces ended at these times."""
    args = {"op": "all_reduce", "waited_us": 1.0}
    events = [op("all_reduce: a", t - 3, 3, cat="collective") | {"args": args} for t in ends]
    return {"rank": number, "world": 3, "host_name": host, "baseTimeNanoseconds": base, "traceEvents": events}


def test_ranks_are_processes_of_one_clock():
    ranks = [rank(0, "a", 5000, 100, 200, 300), rank(1, "a", 4000, 102, 202, 302), rank(2, "b", 5000, 149, 250, 351)]
    assert later(ranks) == [0.0, 0.0, 50.0]
    made = merged(ranks)["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in made if e["name"] == "process_name"} == {
        0: "rank 0", 64: "rank 1", 128: "rank 2",
    }  # fmt: skip
    ends = {pid: [e["ts"] + e["dur"] for e in made if e["ph"] == "X" and e["pid"] == pid] for pid in (0, 64, 128)}
    assert ends == {0: [4.0, 104.0, 204.0], 64: [5.0, 105.0, 205.0], 128: [3.0, 104.0, 205.0]}


def test_what_is_exposed():
    waits = [op("all_reduce", 0, 9, cat="collective") | {"args": {"waited_us": w}} for w in (3.0, 5.0)]
    steps = [op("step", 0, 9, cat="step"), op("step", 9, 9, cat="step")]
    assert exposed(waits) == 8e-6
    assert exposed([*waits, *steps]) == 4e-6
    compute = [op("gemm", ts, 10, cat="kernel") for ts in (0, 5, 40)]  # 0 to 15, 40 to 50
    sends = [op("all_reduce", ts, dur, cat="kernel") | {"args": {"kernel": "nccl"}} for ts, dur in ((10, 10), (45, 20))]
    assert exposed([*waits, *compute, *sends]) == (5 + 15) / 1e6
