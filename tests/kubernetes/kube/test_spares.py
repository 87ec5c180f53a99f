"""An operator tells the job how many of its pods are to train; the rest are spares."""

from tests.kubernetes.kube.lab import TALKATIVE, Operators, Place, eventually, needs_a_cluster

needs_a_cluster()


def test_a_job_with_spares_is_sent_how_many_train_and_again_when_that_changes(
    place: Place, operators: Operators
) -> None:
    operators.start(place.name)
    place.submit(spares=1)
    place.there("train-0", "train-1", "train-2")
    conf = {each["name"]: each.get("value") for each in place.pods()["train-0"]["spec"]["containers"][0]["env"]}
    assert "target=2" in str(conf["PET_RDZV_CONF"])
    place.set_status("train-0", podIP=TALKATIVE, podIPs=[{"ip": TALKATIVE}])
    place.start("train-0", "train-1", "train-2")
    eventually(lambda: "size=2 sent" in operators.log.read_text())
    place.scale(3)
    place.there("train-0", "train-1", "train-2", "train-3")
    eventually(lambda: "size=3 sent" in operators.log.read_text())
    place.change(spares=0)
    place.there("train-0", "train-1", "train-2")
