"""Every way in which an estimator reaches a loss, a trainer or a collector, and how to take it back."""

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, DQNLoss, LossModule, PPOLoss, ReinforceLoss
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.utils import (
    ValueEstimators,
    build_value_estimator,
    default_value_kwargs,
    get_value_estimator_entry,
    register_value_estimator,
)
from torchrl.objectives.value import advantages as torchrl_advantages

from rl_triton.integrations import torchrl as ours

with warnings.catch_warnings():
    # TorchRL deprecates classes that it defines on import.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import Collector, MultiSyncCollector
    from torchrl.trainers.algorithms import PPOTrainer

NAMES = {
    "triton_gae": ours.GAE,
    "triton_magae": ours.MultiAgentGAE,
    "triton_td1": ours.TD1Estimator,
    "triton_tdlambda": ours.TDLambdaEstimator,
    "triton_vtrace": ours.VTrace,
}
BUILT_IN = {
    ValueEstimators.GAE: "GAE",
    ValueEstimators.MAGAE: "MultiAgentGAE",
    ValueEstimators.TD1: "TD1Estimator",
    ValueEstimators.TDLambda: "TDLambdaEstimator",
    ValueEstimators.VTrace: "VTrace",
}
LOSSES = [PPOLoss, ClipPPOLoss, A2CLoss, ReinforceLoss]
OBS = "observation"


def actor():
    params = TensorDictModule(nn.Linear(4, 2), in_keys=[OBS], out_keys=["logits"])
    return ProbabilisticActor(
        params,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def critic():
    return ValueOperator(nn.Linear(4, 1), in_keys=[OBS])


def rollout(batch=(3, 6)):
    done = torch.rand(*batch, 1) < 0.2
    obs = torch.randn(*batch, 4)
    following = torch.cat([obs[:, 1:], torch.randn(batch[0], 1, 4)], 1)
    td = TensorDict(
        {
            OBS: obs,
            "action": nn.functional.one_hot(torch.randint(2, batch), 2),
            "action_log_prob": torch.randn(batch) - 1,
            "next": {
                OBS: following,
                "reward": torch.randn(*batch, 1),
                "done": done,
                "terminated": done & (torch.rand(*batch, 1) < 0.5),
            },
        },
        batch,
    )
    td.names = [None, "time"]
    return td


def loss_classes(cls=LossModule):
    return {cls}.union(*(loss_classes(child) for child in cls.__subclasses__()))


def snapshot(losses):
    """What `register` and `install` may change."""
    supported = {cls: vars(cls).get("SUPPORTED_VALUE_ESTIMATORS") for cls in losses}
    entries = [get_value_estimator_entry(member) for member in BUILT_IN]
    exported = [getattr(torchrl_value, name) for name in BUILT_IN.values()]
    return supported, [(entry.cls, entry.default_kwargs) for entry in entries], exported


@pytest.fixture(autouse=True)
def _unchanged():
    """Each test leaves TorchRL as it found it."""
    torch.manual_seed(0)
    losses = loss_classes()
    before = snapshot(losses)
    yield
    ours.uninstall()
    ours.unregister()
    assert snapshot(losses) == before


@pytest.fixture
def registered():
    ours.register()


def loss_of(loss_class) -> Any:
    return loss_class(actor(), critic())


def advantage(loss, td):
    """The loss computes the advantage itself where the data has none."""
    written = []
    hook = loss.value_estimator.register_forward_hook(
        lambda module, args, output: written.append(output["advantage"].detach())
    )
    loss(td.clone())
    hook.remove()
    return written[0]


def test_module_before_the_loss():
    loss = loss_of(ClipPPOLoss)
    td = rollout()
    theirs = td.clone()
    ours.GAE(gamma=0.9, lmbda=0.8, value_network=loss.critic_network)(td)
    torchrl_value.GAE(gamma=0.9, lmbda=0.8, value_network=loss.critic_network)(theirs)
    for key, value in loss(td).items():
        torch.testing.assert_close(value, loss(theirs)[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_class", LOSSES)
def test_instance(loss_class):
    loss = loss_of(loss_class)
    estimator = ours.GAE(gamma=0.9, lmbda=0.8, value_network=loss.critic_network)
    loss.make_value_estimator(estimator)
    assert loss.value_estimator is estimator
    td = rollout()
    want = torchrl_value.GAE(gamma=0.9, lmbda=0.8, value_network=loss.critic_network)(td.clone())["advantage"]
    torch.testing.assert_close(advantage(loss, td), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_class", LOSSES)
def test_class_with_a_value_network(loss_class):
    loss = loss_of(loss_class)
    loss.make_value_estimator(ours.GAE, gamma=0.9, lmbda=0.8, value_network=loss.critic_network)
    assert type(loss.value_estimator) is ours.GAE
    assert advantage(loss, rollout()).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loss_class", LOSSES)
def test_names(registered, loss_class, name):
    member = next(m for m in BUILT_IN if f"triton_{m.name.lower()}" == name)
    loss = loss_of(loss_class)
    if member not in loss_class.SUPPORTED_VALUE_ESTIMATORS:
        with pytest.raises(NotImplementedError, match=name):
            loss.make_value_estimator(name)
        return
    loss.make_value_estimator(name, gamma=0.9)
    assert type(loss.value_estimator) is NAMES[name]
    td = rollout()
    got = advantage(loss, td)
    if name == "triton_vtrace":
        # TorchRL's module does not score the stored action.
        assert got.isfinite().all()
        return
    loss.make_value_estimator(member, gamma=0.9)
    assert not isinstance(loss.value_estimator, NAMES[name])
    torch.testing.assert_close(got, advantage(loss, td), rtol=1e-4, atol=1e-5)


def test_the_loss_forwards_its_keys(registered):
    loss = loss_of(PPOLoss)
    loss.set_keys(advantage="adv", reward=("agent", "reward"), sample_log_prob="lp")
    loss.make_value_estimator("triton_vtrace")
    keys = loss.value_estimator.tensor_keys
    assert (keys.advantage, keys.reward, keys.sample_log_prob) == ("adv", ("agent", "reward"), "lp")


def test_names_have_the_defaults_of_the_built_ins(registered):
    for name, cls in NAMES.items():
        entry = get_value_estimator_entry(name)
        member = next(m for m in BUILT_IN if f"triton_{m.name.lower()}" == name)
        assert entry.cls is cls
        assert entry.default_kwargs == default_value_kwargs(member)


def test_names_by_build_value_estimator(registered):
    # Without patching the loss class: the estimator is built for the loss and handed over.
    loss = loss_of(A2CLoss)
    estimator = build_value_estimator(loss, "triton_vtrace", gamma=0.9)
    assert type(estimator) is ours.VTrace
    loss.make_value_estimator(estimator)
    assert advantage(loss, rollout()).isfinite().all()


def test_losses_support_the_names_of_what_they_supported(registered):
    assert set(NAMES) <= set(PPOLoss.SUPPORTED_VALUE_ESTIMATORS)
    assert "triton_gae" not in DQNLoss.SUPPORTED_VALUE_ESTIMATORS
    assert "triton_tdlambda" in DQNLoss.SUPPORTED_VALUE_ESTIMATORS
    ours.register()
    assert PPOLoss.SUPPORTED_VALUE_ESTIMATORS.count("triton_gae") == 1


def test_a_loss_class_defined_later(registered):
    class Later(PPOLoss):
        SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.GAE,)

    assert "triton_gae" not in Later.SUPPORTED_VALUE_ESTIMATORS
    ours.register()
    assert Later.SUPPORTED_VALUE_ESTIMATORS == (ValueEstimators.GAE, "triton_gae")
    ours.unregister()
    assert Later.SUPPORTED_VALUE_ESTIMATORS == (ValueEstimators.GAE,)
    ours.register()


def test_unregister_takes_the_names_back(registered):
    ours.unregister()
    with pytest.raises(KeyError, match="triton_gae"):
        loss_of(PPOLoss).make_value_estimator("triton_gae")


@pytest.mark.parametrize("member", BUILT_IN)
def test_install_replaces_the_built_ins(member):
    cls = getattr(ours, BUILT_IN[member])
    defaults = default_value_kwargs(member)
    ours.install()
    assert getattr(torchrl_value, BUILT_IN[member]) is cls
    assert get_value_estimator_entry(member).cls is cls
    assert default_value_kwargs(member) == defaults
    loss = loss_of(PPOLoss)
    loss.make_value_estimator(member)
    assert type(loss.value_estimator) is cls
    ours.uninstall()
    assert getattr(torchrl_value, BUILT_IN[member]) is getattr(torchrl_advantages, BUILT_IN[member])
    loss.make_value_estimator(member)
    assert type(loss.value_estimator) is not cls


@pytest.mark.parametrize("loss_class", LOSSES)
def test_install_reaches_the_default_of_every_loss(loss_class):
    ours.install()
    loss = loss_of(loss_class)
    default = loss_class.default_value_estimator
    assert type(loss.value_estimator) is getattr(ours, BUILT_IN[default])
    assert advantage(loss, rollout()).isfinite().all()


def test_installed_for_a_block():
    original = torchrl_value.GAE
    with pytest.raises(ZeroDivisionError), ours.installed():
        assert torchrl_value.GAE is ours.GAE
        raise ZeroDivisionError
    assert torchrl_value.GAE is original
    ours.install()
    with ours.installed():
        ours.install()
    # The block was not what installed them.
    assert torchrl_value.GAE is ours.GAE
    ours.uninstall()
    ours.uninstall()
    assert torchrl_value.GAE is original


def test_install_puts_back_what_it_found():
    class Mine(torchrl_value.GAE):
        pass

    entry = get_value_estimator_entry(ValueEstimators.GAE)
    register_value_estimator(ValueEstimators.GAE, default_kwargs={"gamma": 0.5, "lmbda": 0.5})(Mine)
    try:
        with ours.installed():
            assert default_value_kwargs(ValueEstimators.GAE) == {"gamma": 0.5, "lmbda": 0.5}
        assert get_value_estimator_entry(ValueEstimators.GAE).cls is Mine
    finally:
        register_value_estimator(ValueEstimators.GAE, default_kwargs=entry.default_kwargs)(entry.cls)


def test_importing_alone_changes_nothing():
    script = """
from torchrl.objectives import PPOLoss, value
from torchrl.objectives.utils import _VALUE_ESTIMATOR_REGISTRY as registry
before = dict(registry), PPOLoss.SUPPORTED_VALUE_ESTIMATORS, dict(vars(value))
import rl_triton.integrations.torchrl
assert before == (dict(registry), PPOLoss.SUPPORTED_VALUE_ESTIMATORS, dict(vars(value)))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def cartpole() -> Any:
    return GymEnv("CartPole-v1")


COLLECTION = {"frames_per_batch": 32, "total_frames": 32, "auto_register_policy_transforms": True}


@pytest.mark.parametrize("estimator", ["GAE", "VTrace"])
def test_postproc_of_a_collector(estimator):
    policy, value = actor(), critic()
    networks = {"value_network": value} | ({"actor_network": policy} if estimator == "VTrace" else {})
    options = {"lmbda": 0.95} if estimator == "GAE" else {}
    postproc = getattr(ours, estimator)(gamma=0.99, **networks, **options)
    collector = Collector(cartpole(), policy, postproc=postproc, **COLLECTION)
    for batch in collector:
        assert batch["advantage"].shape == (32, 1)
        recomputed = postproc(batch.clone())["advantage"]
        torch.testing.assert_close(batch["advantage"], recomputed)
    collector.shutdown()


def test_postproc_with_a_worker_process():
    postproc = ours.GAE(gamma=0.99, lmbda=0.95, value_network=critic())
    collector = MultiSyncCollector([cartpole], actor(), postproc=postproc, cat_results="stack", **COLLECTION)
    try:
        for batch in collector:
            assert batch["advantage"].shape == (1, 32, 1)
            torch.testing.assert_close(batch["advantage"], postproc(batch.clone())["advantage"])
    finally:
        collector.shutdown()


@pytest.mark.filterwarnings("ignore:PPOTrainer is an experimental", "ignore::FutureWarning")
def test_ppo_trainer():
    policy, value = actor(), critic()
    gae = ours.GAE(gamma=0.99, lmbda=0.95, value_network=value, average_gae=True)
    calls = []
    gae.register_forward_hook(lambda *_: calls.append(1))
    loss = ClipPPOLoss(policy, value)
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    trainer = PPOTrainer(
        collector=Collector(cartpole(), policy, **COLLECTION),
        total_frames=32,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        progress_bar=False,
        enable_logging=False,
        num_epochs=2,
        gae=gae,
        replay_buffer=ReplayBuffer(
            storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement(), batch_size=16
        ),
    )
    trainer.train()
    assert len(calls) == 2
    assert any(not old.equal(new) for old, new in zip(before, loss.parameters(), strict=True))
